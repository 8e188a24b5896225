"""Every error that minisgl raises on purpose.

MinisglError
├── InvalidRequest (also ValueError)   the caller's input; names the prompt, the value and the limit
├── ModelLoadError                     the model folder; names the file
├── EngineStartError                   a process did not become ready; carries its own text
│   └── AddressInUse                   another engine serves this address
├── EngineDead                         sticky: every later call on this LLM raises it again
├── EngineUnreachable                  nobody answers at the address
├── Overloaded                         the queue is full; try again later
├── PeerLost                           between workers: a rank that others wait for is gone
├── DeadlineExceeded                   a bound on time ran out
└── ProtocolMismatch                   the peer speaks another version
    └── ProtocolError                  a frame that is not a message of this version
"""


class MinisglError(Exception):
    """Base of all errors of minisgl."""


class InvalidRequest(MinisglError, ValueError):
    """The request itself is wrong; nothing was sent to a worker and the engine goes on."""


class ModelLoadError(MinisglError):
    """The model cannot be loaded: a missing, broken or unsupported file or value."""


class EngineStartError(MinisglError):
    """The engine or one of its workers did not become ready."""


class AddressInUse(EngineStartError):
    """Another running engine holds the address."""


class EngineDead(MinisglError):
    """The engine or one of its workers is gone; the text names the process and the cause."""


class EngineUnreachable(MinisglError):
    """No engine answers at the address."""


class Overloaded(MinisglError):
    """The engine's queue is full."""


class PeerLost(MinisglError):
    """An exchange among the ranks of a model broke off. It is a consequence: the cause is another rank's."""


class DeadlineExceeded(MinisglError):
    """A call did not finish within its deadline."""


class ProtocolMismatch(MinisglError):
    """The two sides speak different versions of the protocol."""


class ProtocolError(ProtocolMismatch):
    """A frame that cannot be decoded as a message of this protocol version."""


# Process exit codes, so that a supervisor knows the kind of failure without parsing text.
EXIT_USAGE = 2  # bad flags or configuration
EXIT_START = 3  # the model or a worker could not be started
EXIT_ADDRESS = 4  # the address is taken
EXIT_CHILD_DIED = 5
EXIT_STALLED = 6
EXIT_INTEGRITY = 7
