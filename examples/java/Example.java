// Lists models, sends a request and explains an error; docs/other-languages.md says how to generate its client.
import attention.v1.AttendRequest;
import attention.v1.AttentionServiceGrpc;
import attention.v1.AttentionServiceGrpc.AttentionServiceBlockingStub;
import attention.v1.DataType;
import attention.v1.ListModelsRequest;
import attention.v1.VectorSequences;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.concurrent.TimeUnit;

public class Example {
  /** Concatenates the rows of all sequences; all rows have the same width. */
  static VectorSequences pack(float[][]... sequences) {
    int width = sequences[0][0].length, rows = 0;
    for (float[][] sequence : sequences) rows += sequence.length;
    ByteBuffer data = ByteBuffer.allocate(4 * rows * width).order(ByteOrder.LITTLE_ENDIAN);
    VectorSequences.Builder packed =
        VectorSequences.newBuilder().setDataType(DataType.DATA_TYPE_FP32).setWidth(width);
    for (float[][] sequence : sequences) {
      packed.addLengths(sequence.length);
      for (float[] row : sequence) for (float element : row) data.putFloat(element);
    }
    return packed.setData(ByteString.copyFrom(data.flip())).build();
  }

  /** The rows of each sequence. */
  static float[][][] unpack(VectorSequences packed) {
    FloatBuffer data =
        packed.getData().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
    float[][][] sequences = new float[packed.getLengthsCount()][][];
    for (int i = 0; i < sequences.length; i++) {
      sequences[i] = new float[packed.getLengths(i)][packed.getWidth()];
      for (float[] row : sequences[i]) data.get(row);
    }
    return sequences;
  }

  /** Prints what programs read of an error. */
  static void explain(StatusRuntimeException error) throws InvalidProtocolBufferException {
    System.err.println(error.getStatus());
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status == null) return; // the error is not the service's own
    for (Any detail : status.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        System.err.println("reason " + detail.unpack(ErrorInfo.class).getReason());
      } else if (detail.is(BadRequest.class)) {
        System.err.println("field " + detail.unpack(BadRequest.class).getFieldViolations(0).getField());
      } else if (detail.is(RetryInfo.class)) {
        System.err.println("repeat after " + detail.unpack(RetryInfo.class).getRetryDelay());
      }
    }
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget("127.0.0.1:8001")
            .usePlaintext()
            .maxInboundMessageSize(Integer.MAX_VALUE)
            .build();
    AttentionServiceBlockingStub stub = AttentionServiceGrpc.newBlockingStub(channel);
    stub.withDeadlineAfter(10, TimeUnit.SECONDS)
        .listModels(ListModelsRequest.getDefaultInstance())
        .getModelsList()
        .forEach(model -> System.out.println(model.getName() + " " + model.getVersion() + " " + model.getState()));

    float[][] first = new float[2][16], second = new float[1][16];
    first[0][0] = 1f;
    second[0][15] = -0.5f;
    AttendRequest.Builder request =
        AttendRequest.newBuilder()
            .setModelName("self-attention")
            .setQuery(pack(first, second))
            .setOutputDataType(DataType.DATA_TYPE_FP32);
    for (float[][] rows :
        unpack(stub.withDeadlineAfter(10, TimeUnit.SECONDS).attend(request.build()).getContextVectors())) {
      System.out.println(rows.length + " x " + rows[0].length + " " + rows[0][0] + " " + rows[0][1] + " " + rows[0][2]);
    }

    try {
      stub.withDeadlineAfter(10, TimeUnit.SECONDS).attend(request.setModelName("absent").build());
    } catch (StatusRuntimeException error) {
      explain(error);
    }
    channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
  }
}
