"""Streams of tokens from another process: every few ms each socket gets the time. Stdlib only.

python ticker.py INTERVAL_S FD [FD ..]
"""

import socket
import struct
import sys
import time


def main() -> None:
    interval = float(sys.argv[1])
    streams = [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]]
    gap = interval / len(streams)
    due = time.monotonic()
    try:
        while True:
            # Spread over the interval, as streams that know nothing of each other are.
            for stream in streams:
                due += gap
                wait = due - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                stream.send(struct.pack("<q", time.monotonic_ns()))
            due = max(due, time.monotonic() - interval)
    except (BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
