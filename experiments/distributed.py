"""Options of a command that runs as several processes."""

from dataclasses import dataclass

from experiments.processes import processes, start
from jaxlogp.errors import require


@dataclass(frozen=True)
class ProcessOptions:
    """Processes of one run, on one or several hosts (docs/scaling.md)."""

    distributed: bool = False
    """Join the other processes of the run, all started with the same options.
    SLURM and Open MPI start one per GPU and number them; elsewhere start one per host and set the three options below."""
    coordinator: str | None = None
    """host:port of process 0, with a free port."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""

    def join(self, resume: str | None) -> None:
        """Joins the other processes, if there are any; all of them resume the same run, or none.

        Raises:
            ValueError: if an option cannot be used, or processes resume different runs.
        """
        place = {"coordinator": self.coordinator, "num_processes": self.num_processes, "process_id": self.process_id}
        if self.distributed:
            start(**place)
            processes().require_same("command line", {"--resume": resume})
        for name, value in place.items():
            expected = "no value without --distributed"
            require(self.distributed or value is None, f"--{name.replace('_', '-')}", expected, value)
