"""A client for the attention inference service. The names exported here are its public interface.

```python
from attention_client import AttentionClient

with AttentionClient("127.0.0.1:8001") as client:
    result = client.attend("self-attention", query, return_weights=True)
    result.context_vectors, result.attention_weights
```
"""

from attention_client._calls.attention import AttendInputs
from attention_client._calls.contexts import Context
from attention_client._calls.embeddings import TextTruncatedWarning
from attention_client._client import AsyncAttentionClient, AttentionClient
from attention_client._connection.tls import TlsFiles
from attention_client._models import (
    ClassifierInfo,
    CostInfo,
    EncoderInfo,
    ModelInfo,
    ParityInfo,
    PatternInfo,
    TensorInfo,
)
from attention_client._values import (
    AttentionResult,
    EmbeddingInputs,
    Embeddings,
    HeadSelection,
    InferResult,
    Ranking,
    SparseVector,
    TextInputs,
    TokenInputs,
    TokenizedText,
)
from attention_client.errors import (
    AttentionClientError,
    CallCancelledError,
    ClientClosedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    MessageTooLargeError,
    ModelChangedError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncAttentionClient",
    "AttendInputs",
    "AttentionClient",
    "AttentionClientError",
    "AttentionResult",
    "CallCancelledError",
    "ClassifierInfo",
    "ClientClosedError",
    "Context",
    "CostInfo",
    "DeadlineExceededError",
    "EmbeddingInputs",
    "Embeddings",
    "EncoderInfo",
    "FailedPreconditionError",
    "HeadSelection",
    "InferResult",
    "InternalError",
    "InvalidArgumentError",
    "LimitExceededError",
    "MessageTooLargeError",
    "ModelChangedError",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "ParityInfo",
    "PatternInfo",
    "PermissionDeniedError",
    "Ranking",
    "ResourceExhaustedError",
    "SparseVector",
    "TensorInfo",
    "TextInputs",
    "TextTruncatedWarning",
    "TlsFiles",
    "TokenInputs",
    "TokenizedText",
    "UnauthenticatedError",
    "UnavailableError",
    "__version__",
]
