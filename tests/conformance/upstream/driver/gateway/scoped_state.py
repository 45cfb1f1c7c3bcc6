"""As Monarch's helper of this name, which shuts host meshes down through a private attribute of the state."""

from contextlib import contextmanager


@contextmanager
def scoped_state(job, cached_path=".monarch/job_state.pkl"):
    try:
        yield job.state(cached_path=cached_path)
    finally:
        job.kill()
