"""What the calls share to receive requests that carry tensors."""

from dataclasses import dataclass

from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.rpc.calls.codec_threads import CodecThreads

# Messages of more bytes are decoded on the codec threads, unless they are known. Handing over costs 60 us;
# decoding this much takes 1 ms at worst.
LARGE_BYTES = 64 << 10
# Replies of more bytes are encoded on the codec threads. To encode that much takes less than a millisecond.
LARGE_REPLY_BYTES = 1 << 20


@dataclass(frozen=True)
class Intake:
    """What the calls of all methods that carry tensors share.

    Attributes:
        budget: The memory of the requests in flight.
        threads: Decode and encode what is large.
    """

    budget: MemoryBudget
    threads: CodecThreads
