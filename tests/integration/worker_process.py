"""A worker as a process of its own, for tests that kill it. Prints "joined", then lives until it is ended.

Arguments: address job name dim mode. Mode "idle" heartbeats and never pushes; "watch" also waits in WatchRound; "train"
pushes a constant delta for every round; "pulse" heartbeats 20 times a second until its input ends, then prints how many
were answered and how long the slowest took.
"""

import select
import sys
import time

import grpc

import harness


def main():
    address, job, name, dim, mode = sys.argv[1:6]
    worker = harness.Worker(address, job, name, dim=int(dim))
    print("joined", flush=True)
    if mode == "pulse":
        count, slowest = 0, 0.0
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            began = time.monotonic()
            worker.heartbeat()
            slowest = max(slowest, time.monotonic() - began)
            count += 1
        print(count, slowest)
        return
    round_number = max(1, worker.joined.round)
    while True:
        if mode == "idle":
            worker._stop.wait()
        watch = worker.watch(round_number, timeout=600)
        if mode == "train":
            started = watch.wait("started", 600)
            try:
                worker.push(round_number, [0.25] * int(dim), base_digest=started.base_digest)
            except grpc.RpcError as error:
                print(harness.Refusal(error), file=sys.stderr, flush=True)
        watch.wait("committed", 600)
        watch.cancel()
        round_number += 1


if __name__ == "__main__":
    main()
