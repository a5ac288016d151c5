"""A whole worker in Python: fits y = <truth, x> by SGD in blocks. Its C++ twin is linear.cc; both may train in one job.

usage: linear.py HOST:PORT JOB WORKER
"""

import sys

import bmuf
import numpy as np

INPUTS = 8
LEARNING_RATE = np.float32(0.05)


def main(target, job, worker):
    truth = np.arange(INPUTS, dtype=np.float32)
    w = np.zeros(INPUTS, np.float32)
    log = lambda line: print(line, file=sys.stderr)
    with bmuf.join(target, job=job, worker=worker, model={"w": w}, on_event=log) as session:
        random = np.random.default_rng(session.rank)
        while not session.done:
            x = random.standard_normal(INPUTS, dtype=np.float32)
            error = np.dot(w - truth, x)
            w -= LEARNING_RATE * error * x
            session.step(samples=1, loss=0.5 * float(error) ** 2)
        print("version", session.version, "w", *(f"{value:.9g}" for value in w))


if __name__ == "__main__":
    main(*sys.argv[1:])
