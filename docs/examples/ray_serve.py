"""Replicas of the HTTP server by Ray Serve, each with a decoder of its own; needs Ray."""

import argparse
import time

from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp

from heavypath.speculative.http.batches.worker import Worker
from heavypath.speculative.loading import load_pair


def application() -> ASGIApp:
    """The server's application over a decoder, made anew in each replica."""
    return Worker(load_pair(), "heavypath-demo").app


Replica = serve.deployment(serve.ingress(application)())

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="until it stops")
    args = parser.parse_args()
    serve.start(http_options={"port": args.port})
    serve.run(Replica.options(num_replicas=args.replicas).bind())
    end = time.monotonic() + args.seconds
    print(f"serving on port {args.port}", flush=True)
    while time.monotonic() < end:
        time.sleep(0.2)
    serve.shutdown()
