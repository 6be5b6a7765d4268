"""Uses LangChain's `with_structured_output` and `bind_tools` with a cluster, unmodified and as documented.

Arguments: base URL, model.
"""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

base, model = sys.argv[1:3]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=130)
    mood: Literal["happy", "sad"]
    friends: list[str] = Field(max_length=2)


chat = ChatOpenAI(model=model, base_url=base, api_key="not-checked-on-loopback", temperature=0, max_tokens=600, max_retries=0)
for method in ("json_schema", "function_calling"):
    person = chat.with_structured_output(Person, method=method).invoke("Tell me about Ada, who is 36 and happy.")
    assert isinstance(person, Person), (method, person)
    print(method, person)
raw = chat.with_structured_output(Person.model_json_schema(), method="json_schema", strict=False).invoke("Ada again.")
assert set(raw) == {"name", "age", "mood", "friends"}, raw
bound = chat.bind_tools([Person], tool_choice="required").invoke("Ada, please.")
assert bound.tool_calls and bound.tool_calls[0]["name"] == "Person", bound
Person(**bound.tool_calls[0]["args"])
