"""Handle calls that Serve takes for requests of their own (shell).

Private parts of Ray Serve, read in 2.60.0: a handle call gets its internal request id from the context it is made in,
and the router knows what it has to place by that id alone. Of two calls made for one HTTP request it finds the first
only, and looks for a place for the second for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ray.serve._private.utils import generate_request_id
from ray.serve.context import _get_serve_request_context, _serve_request_context


@contextmanager
def own_request() -> Iterator[None]:
    """Give the handle call made within the block an id that no other has.

    Serve cancels calls together with the HTTP request whose id they have; who makes one here has to cancel it.
    """
    context = replace(_get_serve_request_context(), _internal_request_id=generate_request_id())
    outside = _serve_request_context.set(context)
    try:
        yield
    finally:
        _serve_request_context.reset(outside)
