"""The house checks must be able to fail: each is shown a small house with one known fault."""

import contextlib
import importlib.util
import io
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(check, extra):
    with tempfile.TemporaryDirectory() as tmp:
        root = pathlib.Path(tmp)
        files = {f"core/base/f{i}.h": "\n" for i in range(30)}
        files["server/model/model.h"] = "\n"
        files["server/service/service.h"] = "\n"
        files.update(extra)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            return load(check).main(root)


CASES = [
    ("layering_test", {}, 0, "a clean house"),
    ("layering_test", {"server/service/a.cc": '#include "server/model/model.h"\n'}, 0, "down"),
    ("layering_test", {"server/model/a.cc": '#include "server/service/service.h"\n'}, 1, "up"),
    ("layering_test", {"server/engine/a.cc": '#include "server/model/model.h"\n'}, 1, "across"),
    ("layering_test", {"client/a.cc": '#include "server/model/model.h"\n'}, 1, "client into server"),
    ("layering_test", {"attic/a.cc": "\n", "server/attic2/b.cc": "\n"}, 0, "the server's own roof"),
    ("layering_test", {"core/attic/b.cc": "\n"}, 1, "a folder on no floor"),
    ("rules_test", {}, 0, "a clean house"),
    ("rules_test", {"server/engine/a.cc": "auto t = absl::Now();\n"}, 1, "a clock in the engine"),
    ("rules_test", {"server/engine/a.cc": "// not absl::Now() here\n"}, 0, "a comment"),
    ("rules_test", {"core/base/x_test.cc": "absl::SleepFor(d);\n"}, 1, "a test that sleeps"),
    ("rules_test", {"core/base/string_utils.h": "\n"}, 1, "a name that says nothing"),
]

faults = [why for check, extra, want, why in CASES if verdict(check, extra) != want]
print(f"{len(CASES)} cases, wrong: {faults}")
sys.exit(1 if faults else 0)
