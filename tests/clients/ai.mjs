// What Vercel's ai does with the server: node ai.mjs BASE
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "heavypath", baseURL: process.argv[2], apiKey: "any", supportsStructuredOutputs: true,
});
const model = provider("heavypath-demo");
const prompt = "def read_lines(path):";

assert((await generateText({ model, prompt, frequencyPenalty: 0.5, presencePenalty: 0.2 })).usage.outputTokens > 0);
let streamed = "";
for await (const part of streamText({ model, prompt, maxOutputTokens: 16 }).textStream) streamed += part;
assert(streamed.length > 0);
const schema = z.object({ name: z.string().max(8), size: z.number().int().min(0).max(99) });
const { object } = await generateObject({ model, schema, prompt });
assert(Number.isInteger(object.size));
const tools = { readFile: tool({ description: "Reads.", inputSchema: schema }) };
for (const ask of [generateText, streamText]) {
  const answer = await ask({ model, prompt, tools, toolChoice: "required" });
  const calls = await answer.toolCalls;
  assert.equal(calls[0].toolName, "readFile");
  assert(Number.isInteger(calls[0].input.size));
}
console.log("ok");
