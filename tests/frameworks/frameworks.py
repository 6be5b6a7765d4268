"""Uses a cluster through frameworks for agents, unmodified: smolagents, DSPy, Haystack, Semantic Kernel, AutoGen, Strands.

Arguments: the base URL of OpenAI's API and the model. A small model may call a tool when it should answer, so the calls
and formats are required where a result is checked.
"""

import asyncio
import os
import sys
from typing import Literal

base, model = sys.argv[1:3]
os.environ["OPENAI_API_KEY"] = KEY = "not-checked-on-loopback"
os.environ["OTEL_SDK_DISABLED"] = "true"
# Otherwise LiteLLM downloads prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
QUESTION = "What is the weather in Paris?"

from pydantic import BaseModel  # noqa: E402


class Place(BaseModel):
    """A city."""

    city: Literal["Paris", "Oslo"]


def smol():
    from smolagents import AgentMaxStepsError, OpenAIModel, ToolCallingAgent, tool

    asked = []

    @tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: the name of a city
        """
        asked.append(city)
        return "sunny"

    served = OpenAIModel(model_id=model, api_base=base, api_key=KEY, max_tokens=80, temperature=0)
    turn = [{"role": "user", "content": "Say hello."}]
    whole = served(turn).content
    assert whole and "".join(piece.content or "" for piece in served.generate_stream(turn)) == whole
    for streamed in (False, True):
        agent = ToolCallingAgent(tools=[weather], model=served, max_steps=1, verbosity_level=0, stream_outputs=streamed)
        agent.run(QUESTION)
        steps = [step for step in agent.memory.steps if getattr(step, "model_output_message", None)]
        assert steps and not any(isinstance(step.error, AgentMaxStepsError) for step in steps), steps


def dspy_():
    import dspy

    served = dspy.LM(f"openai/{model}", api_base=base, api_key=KEY, max_tokens=200, temperature=0.1, cache=False)
    dspy.configure(lm=served)
    assert served("Say hello.")[0]
    assert len(served("Say hello.", n=3, temperature=1.0)) == 3
    assert served("Say hello.", logprobs=True, max_tokens=3)[0]["logprobs"].content
    of_responses = dspy.LM(
        f"openai/{model}", api_base=base, api_key=KEY, max_tokens=60, cache=False, model_type="responses"
    )
    assert of_responses("Say hello.")[0]
    of_text = dspy.LM(
        f"text-completion-openai/{model}", api_base=base, api_key=KEY, max_tokens=20, cache=False, model_type="text"
    )
    assert of_text("Once upon a time")[0]


def haystack():
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    asked = [ChatMessage.from_user(QUESTION)]
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
    weather = Tool(name="weather", description="weather", parameters=parameters, function=lambda city: "sunny")
    for kind, limit in ((OpenAIChatGenerator, "max_tokens"), (OpenAIResponsesChatGenerator, "max_output_tokens")):

        def reply(messages, tools=None, stream=None, **more):
            generator = kind(model=model, api_base_url=base, generation_kwargs={limit: 60, "temperature": 0, **more})
            (reply,) = generator.run(messages, tools=tools, streaming_callback=stream)["replies"]
            return reply

        pieces = []
        assert reply(asked).text == reply(asked, stream=pieces.append).text and len(pieces) > 1, kind
        for stream in (None, pieces.append):
            call = reply(asked, [weather], stream, tool_choice="required").tool_calls[0]
            assert call.tool_name == "weather" and call.arguments["city"] in ("Paris", "Oslo"), (kind, call)


def semantic_kernel():
    from openai import AsyncOpenAI
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    asked = []

    class Weather:
        @kernel_function(description="weather of a city")
        def weather(self, city: str) -> str:
            asked.append(city)
            return "sunny"

    async def chat():
        served = OpenAIChatCompletion(ai_model_id=model, async_client=AsyncOpenAI(base_url=base, api_key=KEY))
        kernel = Kernel()
        kernel.add_service(served)
        kernel.add_plugin(Weather(), "w")
        history = ChatHistory()
        history.add_user_message(QUESTION)

        def settings(**more):
            return OpenAIChatPromptExecutionSettings(max_tokens=80, temperature=0, **more)

        assert str((await served.get_chat_message_contents(history, settings()))[0])
        required = settings(function_choice_behavior=FunctionChoiceBehavior.Required())
        await served.get_chat_message_contents(history.model_copy(deep=True), required, kernel=kernel)
        assert asked
        stream = served.get_streaming_chat_message_contents(history, settings())
        assert len([piece async for piece in stream]) > 1
        formatted = await served.get_chat_message_contents(history, settings(response_format=Place))
        Place.model_validate_json(str(formatted[0]))

    asyncio.run(chat())


def autogen():
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        return "sunny"

    async def chat():
        knows = ("vision", "function_calling", "json_output", "structured_output", "multiple_system_messages")
        info = {"family": "unknown", **{name: name != "vision" for name in knows}}
        client = OpenAIChatCompletionClient(
            model=model, base_url=base, api_key=KEY, model_info=info, max_tokens=80, temperature=0
        )
        assert (await client.create([UserMessage(content="Say hello.", source="user")])).content
        formatted = await client.create([UserMessage(content="Paris", source="user")], json_output=Place)
        Place.model_validate_json(formatted.content)
        reflecting = AssistantAgent("a", model_client=client, tools=[weather], reflect_on_tool_use=True)
        assert (await reflecting.run(task=QUESTION)).messages[-1].to_text()
        streaming = AssistantAgent("a", model_client=client, model_client_stream=True)
        assert len([event async for event in streaming.run_stream(task="Say hello.")]) > 2
        members = [AssistantAgent(name, model_client=client) for name in ("x", "y")]
        team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3))
        said = await team.run(task="Say hello.")
        assert [message.source for message in said.messages] == ["user", "x", "y"]
        await client.close()

    asyncio.run(chat())


def strands():
    from strands import Agent
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    at = {"base_url": base, "api_key": KEY}
    for served in (
        OpenAIModel(client_args=at, model_id=model, params={"max_tokens": 200, "temperature": 0}),
        OpenAIResponsesModel(client_args=at, model_id=model, params={"max_output_tokens": 200, "temperature": 0}),
    ):
        assert str(Agent(model=served, callback_handler=None)("Say hello."))
        pieces = []
        Agent(model=served, callback_handler=lambda **event: pieces.append(event.get("data")))("Say hello.")
        assert len([piece for piece in pieces if piece]) > 1, served


for check in (smol, dspy_, haystack, semantic_kernel, autogen, strands):
    check()
    print(check.__name__.rstrip("_"))
