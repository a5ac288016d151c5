"""House rules that a compiler does not see: calls that are banned in a folder, words that do not belong in a name."""

import pathlib
import re
import sys

# (folders, pattern, why)
BANNED = [
    (["server/engine"], r"absl::Now\(|system_clock|steady_clock|gettimeofday|\btime\(nullptr\)|clock_gettime",
     "the engine is told the time"),
    (["server/engine"], r"\brand\(|random_device|mt19937|absl::BitGen", "the engine draws nothing"),
    (["server/engine"], r"absl::Mutex|std::mutex|std::thread|std::atomic|spdlog|fopen|ofstream|socket\(",
     "the engine has no thread, lock, log, file or socket"),
    (["server", "client", "worker", "core", "tests"],
     r"sleep_for|sleep_until|absl::SleepFor|\busleep\(|\bnanosleep\(|(?<![\w.])sleep\(\d",
     "wait on a condition or an injected clock"),
    (["server", "core", "client"], r"\bgetenv\(", "environment variables are no configuration (but main.cc's layer)"),
    (["server", "core", "client", "worker"], r"std::(system_clock|chrono::system_clock)::now",
     "the clock is injected"),
]
# File -> why it may.
ALLOWED = {
    "core/base/clock.cc": "the one place that reads the clocks",
}
ALLOWED_GETENV = re.compile(r"(main|ctl/main|config)\.cc$")
BAD_NAMES = re.compile(r"(^|[_/])(utils?|common|helpers?|manager)([_./]|$)", re.I)


def main(root):
    faults, seen = [], 0
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.startswith((".git/", "bazel-", "third_party/", "out/")):
            continue
        if path.suffix not in (".cc", ".h", ".cu", ".py", ".sh", ".proto", ".bzl"):
            continue
        if BAD_NAMES.search(name):
            faults.append(f"{name}: a name that says nothing about what is inside")
        if path.suffix not in (".cc", ".h", ".cu"):
            continue
        seen += 1
        text = path.read_text(encoding="utf-8")
        for folders, pattern, why in BANNED:
            if not any(name.startswith(folder + "/") for folder in folders) or name in ALLOWED:
                continue
            in_tests = re.search(r"(_test|_test_\w+)\.(cc|h)$", name)
            if in_tests and "sleep" not in pattern:
                continue
            if "getenv" in pattern and ALLOWED_GETENV.search(name):
                continue
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                code = text.splitlines()[line - 1].split("//")[0]
                if re.search(pattern, code):
                    faults.append(f"{name}:{line}: {match.group(0)!r}: {why}")
    if seen < 20:
        faults.append(f"only {seen} sources found below {root}: this test does not see the tree")
    for fault in faults:
        print("FAULT", fault)
    print(f"{seen} files read, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
