"""FlashInfer compiles a kernel at its first use. Here that happens when the worker starts, and is announced."""

import logging
import time

from flashinfer.jit.core import JitSpec

logger = logging.getLogger(__name__)


def build_announced(spec: JitSpec, expected_s: int) -> None:
    """Compile a kernel that is neither shipped with the package nor in its cache.

    Args:
        expected_s: seconds that this takes on a machine with 16 cores.
    """
    if spec.is_compiled:
        return
    logger.warning("compiling the attention kernel %s, once: about %d s with 16 cores", spec.name, expected_s)
    started = time.monotonic()
    spec.build(verbose=False)
    logger.warning("compiled in %.0f s", time.monotonic() - started)
