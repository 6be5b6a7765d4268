"""Uses a cluster through the OpenAI classes of LangChain, LlamaIndex and LiteLLM, and through Ollama's client and
LangChain's classes for it, unmodified and as documented.

Arguments: the chat cluster's base URL and model, the embedding cluster's base URL and model.
"""

import asyncio
import math
import os
import sys

# Otherwise LiteLLM downloads prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

base, model, embed_base, embed_model = sys.argv[1:5]
KEY = "not-checked-on-loopback"
QUESTION = "What is the capital of France? Answer in one short sentence."
TEXTS = ["A cat sleeps on the warm windowsill.", "Quarterly revenue grew by four percent."]


def similar(a, b):
    dot = sum(x * y for x, y in zip(a, b))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def check_vectors(who, documents, query):
    assert len(documents) == 2 and len(documents[0]) == len(query) == 384, who
    assert similar(documents[0], query) > similar(documents[1], query) + 0.2, who


def langchain():
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(
        model=model, base_url=base, api_key=KEY, temperature=0, max_tokens=48, max_retries=0, stream_usage=True
    )
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.content, whole
    assert whole.usage_metadata["input_tokens"] > 0 and whole.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(chat.stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == whole.content and len(pieces) > 1
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 0
    assert asyncio.run(chat.ainvoke(QUESTION)).content == whole.content
    batch = chat.batch([QUESTION, [("system", "You are brief."), ("human", "Say hello.")]])
    assert batch[0].content == whole.content and batch[1].content
    completion = OpenAI(model=model, base_url=base, api_key=KEY, temperature=0, max_tokens=8, max_retries=0)
    assert completion.invoke("Two plus two is") == "".join(completion.stream("Two plus two is")) != ""
    # By default the class tokenises texts itself, with a tokenizer that it would have to download.
    embeddings = OpenAIEmbeddings(
        model=embed_model, base_url=embed_base, api_key=KEY, check_embedding_ctx_length=False, max_retries=0
    )
    check_vectors("langchain", embeddings.embed_documents(TEXTS), embeddings.embed_query("a sleeping animal"))
    return whole.content


def llama_index():
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=base, api_key=KEY, is_chat_model=True, temperature=0, max_tokens=48, max_retries=0
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = llm.chat(messages).message.content
    assert "Paris" in whole, whole
    deltas = [piece.delta or "" for piece in llm.stream_chat(messages)]
    assert "".join(deltas) == whole and len(deltas) > 1, deltas
    assert asyncio.run(llm.achat(messages)).message.content == whole
    plain = OpenAILike(model=model, api_base=base, api_key=KEY, temperature=0, max_tokens=8, max_retries=0)
    assert plain.complete("Two plus two is").text == "".join(p.delta or "" for p in plain.stream_complete("Two plus two is"))
    embeddings = OpenAILikeEmbedding(model_name=embed_model, api_base=embed_base, api_key=KEY, max_retries=0)
    documents = embeddings.get_text_embedding_batch(TEXTS)
    check_vectors("llama_index", documents, embeddings.get_query_embedding("a sleeping animal"))
    return whole


def lite_llm():
    import litellm

    litellm.telemetry = False
    common = {"api_base": base, "api_key": KEY, "temperature": 0, "max_tokens": 48, "num_retries": 0}
    messages = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(model=f"openai/{model}", messages=messages, **common)
    whole = answer.choices[0].message.content
    assert "Paris" in whole and answer.usage.total_tokens > 0, answer
    stream = litellm.completion(
        model=f"openai/{model}", messages=messages, stream=True, stream_options={"include_usage": True}, **common
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole and len(chunks) > 1, text
    assert any(getattr(c, "usage", None) for c in chunks), "no usage at the end of the stream"
    plain = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Two plus two is", api_base=base, api_key=KEY, max_tokens=8
    )
    assert plain.choices[0].text
    # LiteLLM's name for a server with OpenAI's API.
    hosted = litellm.completion(model=f"hosted_vllm/{model}", messages=messages, **common)
    assert hosted.choices[0].message.content == whole
    vectors = litellm.embedding(
        model=f"openai/{embed_model}", input=[*TEXTS, "a sleeping animal"], api_base=embed_base, api_key=KEY
    )
    vectors = [item["embedding"] for item in vectors.data]
    check_vectors("litellm", vectors[:2], vectors[2])
    try:
        litellm.completion(model="openai/no-such-model", messages=messages, **common)
        raise AssertionError("an unknown model was accepted")
    except litellm.NotFoundError:
        pass
    return whole


def ollama_client():
    import ollama
    from pydantic import BaseModel

    class Town(BaseModel):
        town: str

    client = ollama.Client(host=base.removesuffix("/v1"))
    assert f"{model}:latest" in [listed.model for listed in client.list().models]
    shown = client.show(f"{model}:latest")
    assert "completion" in shown.capabilities and shown.details.family and shown.modelinfo["general.architecture"]
    running = client.ps().models
    assert running[0].model == f"{model}:latest" and running[0].expires_at and running[0].context_length > 0
    assert [line.status for line in client.pull(model, stream=True)][-1] == "success"
    assert client.generate(model).done_reason == "load"
    messages = [{"role": "user", "content": QUESTION}]
    options = {"temperature": 0, "num_predict": 48}
    whole = client.chat(f"{model}:latest", messages, options=options)
    assert "Paris" in whole.message.content and whole.done_reason in ("stop", "length"), whole
    assert whole.prompt_eval_count > 0 and 0 < whole.eval_duration <= whole.total_duration, whole
    pieces = list(client.chat(model, messages, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content and len(pieces) > 2
    assert pieces[-1].done and pieces[-1].eval_count == whole.eval_count
    asynchronous = ollama.AsyncClient(host=base.removesuffix("/v1"))
    assert asyncio.run(asynchronous.chat(model, messages, options=options)).message.content == whole.message.content
    assert client.generate(model, QUESTION, options=options).response == whole.message.content
    raw = {"raw": True, "logprobs": True, "options": {"num_predict": 4}}
    raw = list(client.generate(model, "Two plus two is", stream=True, **raw))
    assert sum(len(piece.logprobs or []) for piece in raw) == 4, raw
    formatted = client.chat(model, messages, format=Town.model_json_schema(), options=options)
    assert Town.model_validate_json(formatted.message.content).town
    vectors = ollama.Client(host=embed_base.removesuffix("/v1")).embed(embed_model, [*TEXTS, "a sleeping animal"])
    check_vectors("ollama", vectors.embeddings[:2], vectors.embeddings[2])
    for stream in (False, True):
        try:
            list(client.chat("no-such-model", messages, stream=stream))
            raise AssertionError("an unknown model was accepted")
        except ollama.ResponseError as error:
            assert error.status_code == 404 and "no-such-model" in error.error, error
    return whole.message.content


def langchain_ollama():
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    host, embed_host = base.removesuffix("/v1"), embed_base.removesuffix("/v1")
    chat = ChatOllama(model=model, base_url=host, temperature=0, num_predict=48, validate_model_on_init=True)
    whole = chat.invoke(QUESTION)
    assert whole.usage_metadata["input_tokens"] > 0 and whole.response_metadata["done_reason"] in ("stop", "length")
    pieces = list(chat.stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == whole.content and len(pieces) > 1
    embeddings = OllamaEmbeddings(model=embed_model, base_url=embed_host)
    check_vectors("langchain", embeddings.embed_documents(TEXTS), embeddings.embed_query("a sleeping animal"))
    return whole.content


clients = (langchain, llama_index, lite_llm, ollama_client, langchain_ollama)
answers = {run.__name__: run() for run in clients}
print(answers)
assert len(set(answers.values())) == 1, "greedy answers do not depend on the client"
