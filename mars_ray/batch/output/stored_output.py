"""The output of a job in a store, such as `s3://bucket/answers`.

The ledger is in a temporary folder of the driver's and made again from the log of the job, which is in the store. So a
job goes on from any machine, and shards are written from what stands in the log, by whoever is the driver then.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from upath import UPath

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.history import History
from mars_ray.batch.output.job_log import JobLog
from mars_ray.batch.output.ledger import LEDGER, Ledger
from mars_ray.errors import OutputError
from mars_ray.storage.driver_lease import DriverLease
from mars_ray.storage.location import check_reachable, store_errors

LOG = "log"


@contextmanager
def open_stored_output(folder: UPath, *, new: bool) -> Iterator[OutputFolder]:
    """Make or go on with an output in a store; `new` puts an earlier one aside, object by object.

    Raises `ConfigError` for a store that is out of reach, and `OutputError` for a folder that holds something else or
    that another process works in. What was made here and stays without a row is removed.
    """
    check_reachable(folder)
    hidden = folder / LEDGER.parent
    with (
        DriverLease(hidden / "driver.json", of=folder).held(),
        TemporaryDirectory() as here,
        closing(Ledger(Path(here) / LEDGER.name, of=folder, durable=False)) as ledger,
    ):
        with store_errors(folder, OutputError, "Cannot use", "Give another output."):
            if new:
                _put_aside(folder)
            elif not (hidden / LOG).exists() and _names(folder):
                raise OutputError(f"{folder} holds something that is no job. Give a new folder or empty this one.")
        log = JobLog(hidden / LOG)
        output = OutputFolder(folder, ledger, History(ledger), log)
        output.replay(log.read())
        with log.kept():
            yield output
        if not ledger.done:
            with suppress(FileNotFoundError):
                log.remove()


def _names(folder: UPath) -> list[str]:
    """Return the objects of a folder but for what belongs to the driver that asks."""
    return [name for name in folder.fs.find(folder.path) if not name.endswith("/driver.json")]


def _put_aside(folder: UPath) -> None:
    """Copy what is there to a folder beside, then remove it, the log last: after a kill the job goes on."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    fs, names = folder.fs, _names(folder)
    for name in names:
        fs.copy(name, aside.path + name.removeprefix(folder.path))
    for name in sorted(names, key=lambda name: f"/{LEDGER.parent}/" in name):
        fs.rm(name)
