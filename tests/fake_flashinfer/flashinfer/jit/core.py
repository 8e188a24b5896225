from dataclasses import dataclass


@dataclass
class JitSpec:
    """A kernel that has to be compiled."""

    name: str
    is_compiled: bool = False

    def build(self, verbose: bool) -> None:
        self.is_compiled = True
