"""The handlers of shared memory in the Open Inference Protocol."""

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.shared_memory import SHARED_MEMORY_IS_OFF, SharedMemory
from attention_serving.server.engine.errors import UnsupportedError
from attention_serving.server.transport.call import Call

NO_CUDA = "CUDA shared memory is not supported by this server; use system shared memory, or send the tensors"


class RegionService:
    """Registers and lists regions of system shared memory. If it is switched off, there are none."""

    def __init__(self, memory: SharedMemory | None) -> None:
        """Creates the handlers; `memory` is None if shared memory is switched off."""
        self._memory = memory

    def register(
        self, request: pb.SystemSharedMemoryRegisterRequest, call: Call
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Registers a region."""
        if self._memory is None:
            raise UnsupportedError(SHARED_MEMORY_IS_OFF)
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregisters a region, or all of them. One that is not registered is no error."""
        if self._memory is not None:
            self._memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def status(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Lists the registered regions, or the one of a name."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name) if self._memory else ():
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size
        return response

    def register_cuda(
        self, request: pb.CudaSharedMemoryRegisterRequest, call: Call
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuses."""
        raise UnsupportedError(NO_CUDA)

    def unregister_cuda(
        self, request: pb.CudaSharedMemoryUnregisterRequest, call: Call
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Does nothing: no region is registered. Load generators call it before they begin."""
        return pb.CudaSharedMemoryUnregisterResponse()

    def status_cuda(
        self, request: pb.CudaSharedMemoryStatusRequest, call: Call
    ) -> pb.CudaSharedMemoryStatusResponse:
        """Lists no regions."""
        return pb.CudaSharedMemoryStatusResponse()
