"""Counts test cases in Bazel's test.xml files: "P passed F failed S skipped".

usage: count_cases.py TESTLOGS_FOLDER
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main():
    passed = failed = skipped = 0
    for path in pathlib.Path(sys.argv[1]).rglob("test.xml"):
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError:
            failed += 1
            continue
        for case in cases:
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
                skipped += 1
            else:
                passed += 1
    print(f"{passed} passed {failed} failed {skipped} skipped")


main()
