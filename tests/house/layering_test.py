"""The floors of the house: an include may point down or stay on its floor, never up or into another wing.

Reads every #include of the tree and prints the map it checked. A folder that is not on the map fails the test: a new
folder must say where it stands.
"""

import os
import pathlib
import re
import sys

# Folder -> (floor, folders of the same floor it may also use).
FLOORS = {
    "proto": 0,
    "third_party": 0,
    "core/base": 1,
    "core/config": 2,
    "core/kernels": 2,
    "core/layout": 2,
    "core/codec": 3,
    "core/filter": 3,
    "server/engine": 4,
    "server/model": 4,
    "server/storage": 5,
    "server/ops": 5,
    "server/coordinator": 6,
    "server/service": 7,
    "server": 9,
    "client": 7,
    "client/ctl": 9,
    "worker": 7,
}
SAME_FLOOR = {
    ("worker", "client"),
}
# Tests stand beside their source and may use anything the roof may; whole-system tests and benchmarks use all.
FREE = ("tests",)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
CLIENT_SIDE = ("client", "worker")


def room(path):
    """The longest folder of FLOORS that holds `path`."""
    folder = os.path.dirname(path)
    while folder:
        if folder in FLOORS:
            return folder
        folder = os.path.dirname(folder)
    return None


def main(root):
    faults, edges = [], set()
    sources = [
        p.relative_to(root).as_posix()
        for top in ("core", "server", "client", "worker", "tests")
        for p in (root / top).rglob("*")
        if p.suffix in (".cc", ".h", ".cu")
    ]
    if len(sources) < 20:
        faults.append(f"only {len(sources)} sources found below {root}: this test does not see the tree")
    for source in sources:
        if source.startswith(FREE):
            continue
        here = room(source)
        if here is None:
            faults.append(f"{source}: its folder is on no floor; add it to FLOORS")
            continue
        for included in INCLUDE.findall((root / source).read_text(encoding="utf-8")):
            if not (root / included).exists():
                continue  # A system header in quotes or a generated one: both are ground.
            there = room(included)
            if there is None or there == here:
                continue
            edges.add((here, there))
            if FLOORS[there] > FLOORS[here]:
                faults.append(f"{source} includes {included}: up from floor {FLOORS[here]} to {FLOORS[there]}")
            elif FLOORS[there] == FLOORS[here] and (here, there) not in SAME_FLOOR:
                faults.append(f"{source} includes {included}: across floor {FLOORS[here]}")
            elif here.startswith(CLIENT_SIDE) and there.startswith("server"):
                faults.append(f"{source} includes {included}: a client uses the server's house")
            elif here.startswith("core") and not there.startswith(("core", "proto")):
                faults.append(f"{source} includes {included}: core uses a wing")
    for floor in sorted(set(FLOORS.values()), reverse=True):
        for folder in sorted(f for f, n in FLOORS.items() if n == floor):
            uses = sorted(t for h, t in edges if h == folder)
            print(f"floor {floor}  {folder:<20} uses {', '.join(uses) or 'nothing of ours but proto'}")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
