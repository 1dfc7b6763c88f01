"""Open the output of a job, wherever it is."""

from contextlib import AbstractContextManager
from pathlib import Path

from mars_ray.batch.output.folder import OutputFolder
from mars_ray.batch.output.local_output import open_local_output
from mars_ray.batch.output.stored_output import open_stored_output
from mars_ray.storage.location import AnyPath


def open_output(folder: AnyPath, *, new: bool) -> AbstractContextManager[OutputFolder]:
    """Make or go on with an output folder on this machine or in a store; `new` puts an earlier one aside.

    Entering raises `OutputError` for a folder that holds something else, that another process works in, or that cannot
    be written to, and `ConfigError` for a store that is out of reach. What was made here and stays without a row is
    removed.
    """
    if isinstance(folder, Path):
        return open_local_output(folder, new=new)
    return open_stored_output(folder, new=new)
