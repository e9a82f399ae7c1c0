"""One ZMQ context for all streams of a process: one IO thread instead of one a stream."""

import zmq.asyncio


def new_context() -> zmq.asyncio.Context:
    """A context to share; the caller ends it with :func:`close_context`."""
    return zmq.asyncio.Context()


def close_context(context: zmq.asyncio.Context) -> None:
    """Close it and every socket that is left, without waiting for anybody."""
    context.destroy(linger=0)
