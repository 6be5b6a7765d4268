// Uses a cluster through JavaScript libraries, unmodified: the clients of OpenAI and Anthropic, Vercel's AI SDK with
// three providers, LangChain.
//
// Arguments: the base URL of OpenAI's API and the model. Run in a directory that has the libraries of package.json. All
// values that the model chooses are from lists, so that a small model cannot fail to end them.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const here = createRequire(`${process.cwd()}/x.js`);
const load = (name) => import(pathToFileURL(here.resolve(name)).href);
const [base, model] = process.argv.slice(2);
const apiKey = "not-checked-on-loopback";
const OpenAI = (await load("openai")).default;
const Anthropic = (await load("@anthropic-ai/sdk")).default;
const { betaZodTool } = await load("@anthropic-ai/sdk/helpers/beta/zod");
const { zodResponseFormat, zodTextFormat } = await load("openai/helpers/zod");
const { Output, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { ChatOpenAI } = await load("@langchain/openai");
const { z } = await load("zod");

const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const place = z.object({ city: z.enum(["Paris", "Oslo"]) });
const weather = ({ city }) => `sunny in ${city}`;
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

async function collect(stream) {
  const all = [];
  for await (const item of stream) all.push(item);
  return all;
}

async function openai() {
  const client = new OpenAI({ baseURL: base, apiKey, maxRetries: 0 });
  assert.strictEqual((await client.models.retrieve(model)).id, model);
  assert((await collect(client.models.list())).length > 0);
  const settings = { model, messages: asked, max_tokens: 40, temperature: 0 };
  const whole = await client.chat.completions.create(settings);
  const stream = client.chat.completions.stream({ ...settings, stream_options: { include_usage: true } });
  const final = await stream.finalChatCompletion();
  assert.strictEqual(final.choices[0].message.content, whole.choices[0].message.content);
  assert.deepStrictEqual(final.usage.completion_tokens, whole.usage.completion_tokens);
  const runner = client.chat.completions.runTools({
    ...settings,
    tools: [{ type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: weather } }],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  assert((await runner.finalFunctionToolCallResult()).startsWith("sunny in "));
  const format = zodResponseFormat(place, "place");
  place.parse((await client.chat.completions.parse({ ...settings, response_format: format })).choices[0].message.parsed);
  const input = { model, input: "Paris", max_output_tokens: 40 };
  place.parse((await client.responses.parse({ ...input, text: { format: zodTextFormat(place, "place") } })).output_parsed);
  const response = await client.responses.stream(input).finalResponse();
  assert(response.output_text.length > 0 && ["completed", "incomplete"].includes(response.status));
  const completion = await client.completions.create({ model, prompt: "a", max_tokens: 2, logprobs: 1, n: 2 });
  assert.strictEqual(completion.choices.length, 2);
  await assert.rejects(client.chat.completions.create({ ...settings, model: "none" }), OpenAI.NotFoundError);
}

async function anthropic() {
  const client = new Anthropic({ baseURL: base.replace(/\/v1$/, ""), apiKey, maxRetries: 0 });
  assert.strictEqual((await client.models.retrieve(model)).id, model);
  const settings = { model, messages: asked, max_tokens: 40 };
  const message = await client.messages.stream(settings).finalMessage();
  assert(message.content[0].text.length > 0 && message.usage.output_tokens > 0);
  assert((await client.messages.countTokens({ model, messages: asked })).input_tokens > 0);
  const tools = [{ name: "weather", description: "weather of a city", input_schema: parameters }];
  const called = await client.messages.stream({ ...settings, tools, tool_choice: { type: "any" } }).finalMessage();
  place.parse(called.content[0].input);
  const last = await client.beta.messages.toolRunner({
    ...settings,
    max_iterations: 2,
    tools: [betaZodTool({ name: "weather", description: "weather of a city", inputSchema: place, run: weather })],
    tool_choice: { type: "any" },
  });
  assert(last.content.length > 0);
}

async function aiSdk() {
  const at = { baseURL: base, apiKey };
  const responses = createOpenAI(at);
  const providers = {
    compatible: createOpenAICompatible({ ...at, name: "kvasir", includeUsage: true, supportsStructuredOutputs: true }),
    anthropic: createAnthropic(at),
    responses,
    chat: (name) => responses.chat(name),
  };
  for (const [name, provider] of Object.entries(providers)) {
    const settings = { model: provider(model), prompt: asked[0].content, maxOutputTokens: 60, temperature: 0 };
    const whole = await generateText(settings);
    assert(whole.text.length > 0 && whole.usage.outputTokens > 0, name);
    const streamed = streamText(settings);
    assert.strictEqual((await collect(streamed.textStream)).join(""), whole.text, name);
    const tools = { weather: tool({ description: "weather", inputSchema: place, execute: async (city) => weather(city) }) };
    const calls = { ...settings, tools, toolChoice: { type: "tool", toolName: "weather" }, stopWhen: stepCountIs(2) };
    const steps = (await generateText(calls)).steps;
    assert(steps[0].toolResults[0].output.startsWith("sunny in "), name);
    const kinds = (await collect(streamText(calls).fullStream)).map((part) => part.type);
    assert(kinds.includes("tool-call") && kinds.includes("tool-result") && !kinds.includes("error"), `${name} ${kinds}`);
    place.parse((await generateText({ ...settings, output: Output.object({ schema: place }) })).output);
  }
}

async function langchain() {
  const settings = { model, apiKey, maxTokens: 40, temperature: 0, configuration: { baseURL: base } };
  for (const useResponsesApi of [false, true]) {
    const chat = new ChatOpenAI({ ...settings, useResponsesApi });
    assert((await chat.invoke("Say hello.")).content.length > 0);
    assert((await collect(await chat.stream("Say hello."))).length > 1);
  }
  const chat = new ChatOpenAI(settings);
  const functions = [{ type: "function", function: { name: "weather", description: "weather", parameters } }];
  place.parse((await chat.bindTools(functions, { tool_choice: "weather" }).invoke("Paris?")).tool_calls[0].args);
  for (const method of ["jsonSchema", "functionCalling"]) {
    place.parse(await chat.withStructuredOutput(place, { method, name: "place" }).invoke("Paris"));
  }
}

for (const check of [openai, anthropic, aiSdk, langchain]) {
  await check();
  console.log(check.name);
}
