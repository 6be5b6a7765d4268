"""Uses a cluster through OpenAI's Agents SDK, Pydantic AI and Outlines, unmodified.

Arguments: the base URL of OpenAI's API and the model. All values that the model chooses are from lists, so that a small
model cannot fail to end them.
"""

import asyncio
import re
import sys
from typing import Literal

from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

base, model = sys.argv[1:3]
ROOT = base.removesuffix("/v1")
KEY = "not-checked-on-loopback"
City = Literal["Paris", "Oslo"]
QUESTION = "What is the weather in Paris?"


class Report(BaseModel):
    city: City
    degrees: Literal[10, 20]


async def agents():
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0)
    asked = []

    @function_tool
    def weather(city: City) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"sunny in {city}"

    @function_tool(strict_mode=False)
    def tag(names: set[City]) -> str:
        """Adds tags, which differ."""
        return "done"

    def settings(**more):
        return ModelSettings(max_tokens=80, temperature=0, **more)

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        served = kind(model=model, openai_client=client)

        def agent(name="weather", **more):
            more.setdefault("model_settings", settings())
            return Agent(name=name, instructions="Be brief.", model=served, **more)

        first = await Runner.run(agent(), "Say hello.")
        assert first.final_output and first.context_wrapper.usage.output_tokens > 0, kind
        again = await Runner.run(agent(), first.to_input_list() + [{"role": "user", "content": "Again."}])
        assert again.final_output, kind
        asked.clear()
        calling = agent(tools=[weather], model_settings=settings(tool_choice="required"))
        called = await Runner.run(calling, QUESTION, max_turns=3)
        assert asked and set(asked) <= {"Paris", "Oslo"}, (kind, asked)
        assert called.final_output, kind
        named = agent(
            tools=[weather, tag],
            model_settings=settings(tool_choice="weather"),
            tool_use_behavior="stop_on_first_tool",
        )
        assert (await Runner.run(named, QUESTION)).final_output.startswith("sunny in "), kind
        asked.clear()
        streamed = Runner.run_streamed(calling, QUESTION, max_turns=3)
        kinds = {event.type async for event in streamed.stream_events()}
        assert asked and {"raw_response_event", "run_item_stream_event"} <= kinds, (kind, kinds)
        typed = await Runner.run(agent(output_type=Report), "It is 20 degrees in Oslo.")
        assert isinstance(typed.final_output, Report), kind
        # A format beside a required call holds for the answer, not for the call.
        asked.clear()
        both = agent(output_type=Report, tools=[weather], model_settings=settings(tool_choice="weather"))
        try:
            await Runner.run(both, QUESTION, max_turns=1)
        except MaxTurnsExceeded:
            assert asked, kind
        spanish = agent("spanish")
        triage = agent("triage", handoffs=[spanish], model_settings=settings(tool_choice="required"))
        assert (await Runner.run(triage, "Hola", max_turns=4)).last_agent.name == "spanish", kind


async def pydantic_ai():
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    of_openai = OpenAIProvider(base_url=base, api_key=KEY)
    settings = ModelSettings(max_tokens=80, temperature=0.0)
    for served in (
        OpenAIChatModel(model, provider=of_openai),
        OpenAIResponsesModel(model, provider=of_openai),
        AnthropicModel(model, provider=AnthropicProvider(base_url=ROOT, api_key=KEY)),
    ):
        plain = Agent(served, instructions="Be brief.", model_settings=settings)
        first = await plain.run("My name is Bob.")
        assert first.output and first.usage.output_tokens > 0, served
        assert (await plain.run("What is my name?", message_history=first.all_messages())).output, served
        async with plain.run_stream("Count to five.") as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 1, (served, pieces)
        # The library knows Anthropic's models by name, and those alone have formats there.
        native = [] if isinstance(served, AnthropicModel) else [NativeOutput(Report)]
        for output in [ToolOutput(Report), *native]:
            typed = Agent(served, output_type=output, model_settings=settings)
            assert isinstance((await typed.run("It is 20 degrees in Oslo.")).output, Report), (served, output)


def outlines():
    import outlines

    constrained = outlines.from_vllm(OpenAI(base_url=base, api_key=KEY, max_retries=0), model)
    assert constrained("Is Paris in France?", Literal["yes", "no"], max_tokens=10) in ("yes", "no")
    assert re.fullmatch(r"\d{3}", constrained("A number.", outlines.regex(r"\d{3}"), max_tokens=10))


async def both():
    await agents()
    await pydantic_ai()


asyncio.run(both())
outlines()
