"""Where the file of a plan's job is: a relative path holds in the folder in which the plan was made or run."""

from __future__ import annotations

import os


def job_file(job: str) -> str:
    """The relative path of a job's file: ``jobs/net.py`` of ``jobs/net.py:Net``; empty where the job has none."""
    path, colon, _ = job.rpartition(":")
    return path if colon and path.endswith(".py") and not os.path.isabs(path) else ""


def folder_of_job(job: str) -> str | None:
    """The working folder, where a job's relative path holds in it; None otherwise, and where a plan file, which is
    UTF-8, cannot name it."""
    folder = os.getcwd() if os.path.isfile(job_file(job)) else None
    return folder if folder is None or folder.isprintable() else None


def job_from_here(job: str, folder: str | None) -> tuple[str, str | None]:
    """(a job as it is loaded from the working folder, the folder in which its relative path holds).

    Its path becomes absolute where the file is in ``folder`` and not here; a file that is here comes first, as in a
    project that was moved or copied.

    Args:
        folder: in which the path was written; None: unknown.
    """
    path = job_file(job)
    if not path or not folder or os.path.isfile(path):
        return job, folder_of_job(job) or folder
    return (absolute_job(job, folder), None) if os.path.isfile(os.path.join(folder, path)) else (job, folder)


def absolute_job(job: str, folder: str | None) -> str:
    """A job with the absolute path of its file, to compare with another's."""
    return os.path.normpath(os.path.join(folder, job)) if job_file(job) and folder else job
