// Lists models, sends a request and explains an error; docs/other-languages.md says how to generate its client.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"math"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	attentionv1 "example.com/client/attention/v1"
)

// pack concatenates the rows of all sequences; all rows have the same width.
func pack(sequences ...[][]float32) *attentionv1.VectorSequences {
	packed := &attentionv1.VectorSequences{
		DataType: attentionv1.DataType_DATA_TYPE_FP32,
		Width:    uint32(len(sequences[0][0])),
	}
	for _, rows := range sequences {
		packed.Lengths = append(packed.Lengths, uint32(len(rows)))
		for _, row := range rows {
			for _, element := range row {
				packed.Data = binary.LittleEndian.AppendUint32(packed.Data, math.Float32bits(element))
			}
		}
	}
	return packed
}

// unpack returns the rows of each sequence.
func unpack(packed *attentionv1.VectorSequences) [][][]float32 {
	data := packed.Data
	sequences := make([][][]float32, len(packed.Lengths))
	for i, length := range packed.Lengths {
		for range length {
			row := make([]float32, packed.Width)
			for j := range row {
				row[j] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*j:]))
			}
			sequences[i], data = append(sequences[i], row), data[4*packed.Width:]
		}
	}
	return sequences
}

// explain prints what programs read of an error.
func explain(err error) {
	failure := status.Convert(err)
	log.Println(failure.Code(), failure.Message())
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			log.Println("reason", detail.Reason)
		case *errdetails.BadRequest:
			log.Println("field", detail.FieldViolations[0].Field)
		case *errdetails.RetryInfo:
			log.Println("repeat after", detail.RetryDelay.AsDuration())
		}
	}
}

func main() {
	connection, err := grpc.NewClient("127.0.0.1:8001",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := attentionv1.NewAttentionServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	listed, err := client.ListModels(ctx, &attentionv1.ListModelsRequest{})
	if err != nil {
		log.Fatal(err)
	}
	for _, model := range listed.Models {
		fmt.Println(model.Name, model.Version, model.State)
	}

	first, second := [][]float32{make([]float32, 16), make([]float32, 16)}, [][]float32{make([]float32, 16)}
	first[0][0], second[0][15] = 1, -0.5
	request := &attentionv1.AttendRequest{
		ModelName:      "self-attention",
		QueryInput:     &attentionv1.AttendRequest_Query{Query: pack(first, second)},
		OutputDataType: attentionv1.DataType_DATA_TYPE_FP32,
	}
	response, err := client.Attend(ctx, request)
	if err != nil {
		log.Fatal(err)
	}
	for _, rows := range unpack(response.ContextVectors) {
		fmt.Println(len(rows), "x", len(rows[0]), rows[0][:3])
	}

	request.ModelName = "absent"
	if _, err = client.Attend(ctx, request); err != nil {
		explain(err)
	}
}
