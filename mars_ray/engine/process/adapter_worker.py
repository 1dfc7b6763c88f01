"""Load adapters in the engine process, in a thread next to the steps.

In:    orders to load, forget and use adapters, by the numbers that the client gives them.
Out:   an event for each load; the engine's adapters, changed between two steps.
Never: delays a step by reading or packing a file.
"""

import ctypes
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from mars_ray.engine.core.adapters import LoadedAdapter
from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.process.messages import AdapterLoaded, ForgetAdapter, LoadAdapter, OrderSocket, UseAdapters
from mars_ray.errors import AdapterError, MarsRayError

log = logging.getLogger(__name__)


class AdapterWorker:
    """Loads and forgets the adapters of an engine, and says which of them requests may name."""

    def __init__(self, engine: DecodingEngine, orders: OrderSocket) -> None:
        self._engine = engine
        self._orders = orders
        self._loaded: dict[int, LoadedAdapter] = {}
        self._loading = ThreadPoolExecutor(1, "adapters", _leave_cores_to_steps)

    def obey(self, order: LoadAdapter | UseAdapters | ForgetAdapter) -> None:
        """Carry out an order between two steps."""
        match order:
            case LoadAdapter():
                self._loading.submit(self._load, order)
            case UseAdapters(by_name):
                self._engine.set_adapters({name: self._loaded[number] for name, number in by_name.items()})
            case ForgetAdapter(number):
                del self._loaded[number]

    def close(self) -> None:
        """Start no further load."""
        self._loading.shutdown(wait=False, cancel_futures=True)

    def _load(self, order: LoadAdapter) -> None:
        try:
            adapter = self._loaded[order.number] = self._engine.load_adapter(order.folder)
            answer = AdapterLoaded(order.number, adapter.nbytes, adapter.card.block)
        except MarsRayError as error:
            answer = AdapterLoaded(order.number, error=error)
        except Exception as bug:
            log.exception("an adapter cannot be loaded")
            answer = AdapterLoaded(order.number, error=AdapterError(f"{order.folder} cannot be loaded: {bug!r}."))
        with suppress(ConnectionError):
            self._orders.send(answer)


def _leave_cores_to_steps() -> None:
    """Let torch compute in this thread alone. `torch.set_num_threads` would set the threads of the steps, too."""
    torch.get_num_threads()  # torch sets the number once in each thread, before the first operation
    with suppress(OSError):
        _torch_openmp().omp_set_num_threads(1)


def _torch_openmp() -> ctypes.CDLL:
    """Return the OpenMP library of torch, whose settings differ from thread to thread. Raises `OSError` without one."""
    folder = Path(torch.__file__).parent
    if sys.platform == "darwin":
        return ctypes.CDLL(str(folder / "lib" / "libomp.dylib"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in lines if "libgomp" in line]
    # Other packages may have loaded copies of their own; torch's are in `torch` or `torch.libs`.
    own = [path for path in mapped if path.startswith(str(folder))]
    return ctypes.CDLL((own + mapped + ["libgomp.so.1"])[0])
