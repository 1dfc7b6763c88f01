"""Limits on the files and batches of one owner."""

from pydantic import BaseModel, ConfigDict, Field


class StorageLimits(BaseModel):
    """Limits on what one owner may store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: int = Field(500, ge=1)
    """Maximum number of files of one owner, results of batches included."""
    file_bytes: int = Field(200 * 2**20, ge=1)
    """Maximum bytes of one uploaded file."""
    bytes: int = Field(2 * 2**30, ge=1)
    """Maximum bytes of all files of one owner. Results of batches count, but are never refused."""
    uploads: int = Field(2, ge=1)
    """Maximum uploads of one key at the same time, in one gateway."""
    rows: int = Field(50_000, ge=1)
    """Maximum rows of one batch."""
    unfinished_batches: int = Field(50, ge=1)
    """Maximum batches of one owner that have not ended."""
