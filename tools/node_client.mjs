// Streams one generation with @grpc/grpc-js, which shares no code with the server's gRPC, and prints each event as a JSON line.
//
//   node tools/node_client.mjs 127.0.0.1:50051 "It is a truth universally" 32
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const [address, text = "It is a truth universally", maxTokens = "32"] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../protos", import.meta.url));
const definition = protoLoader.loadSync("aengine/v1/generation_service.proto", {
  includeDirs: [protos],
  longs: String,
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).aengine.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const call = client.StreamGenerate(
  { spec: { prompt: { text }, stopping: { maxTokens: Number(maxTokens), ignoreEos: true } } },
  { deadline: Date.now() + 60_000 },
);
call.on("data", ({ event }) => console.log(JSON.stringify(event)));
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("status", () => client.close());
