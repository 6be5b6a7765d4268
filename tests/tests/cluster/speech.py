"""Speech through OpenAI's client.

    python speech.py http://HOST:PORT words    a text in every format, its transcript, and refusals
    python speech.py http://HOST:PORT leaves   a long text whose client leaves after the first audio
"""

import sys

import openai

BASE, MODE = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="any", max_retries=0, timeout=300)
speech = client.audio.speech
RATE = 22_050
# The header of a WAV file.
HEADER = 44
TEXT = "The quick brown fox jumps over the lazy dog."


def words():
    for model, voice, rate in [("kokoro", "jf_alpha", 24_000), ("piper-joe", "joe", RATE)]:
        wav = speech.create(model=model, voice=voice, input=TEXT, response_format="wav")
        assert wav.response.headers["content-type"] == "audio/wav", wav.response.headers
        assert wav.content[:4] == b"RIFF" and wav.content[24:28] == rate.to_bytes(4, "little")
        said = client.audio.transcriptions.create(model="whisper-base", file=("fox.wav", wav.content)).text
        assert "quick brown fox" in said and "lazy dog" in said, said
        print(said)
    lossless = speech.create(model="piper-joe", voice="joe", input=TEXT, response_format="flac")
    assert lossless.response.headers["content-type"] == "audio/flac" and len(lossless.content) < len(wav.content)
    heard = client.audio.transcriptions.create(model="whisper-base", file=("fox.flac", lossless.content)).text
    assert "quick brown fox" in heard and "lazy dog" in heard, heard
    fast = speech.create(model="piper-joe", voice="joe", input=TEXT, response_format="pcm", speed=2)
    assert fast.response.headers["content-type"] == "audio/pcm"
    shares = (len(fast.content) / (len(wav.content) - HEADER), len(fast.content) / 2 / RATE)
    assert 0.3 < shares[0] < 0.7 and shares[1] > 0.8, shares
    # Sentence by sentence: a piece of audio arrives before the last one.
    streamed = speech.with_streaming_response
    with streamed.create(model="piper-joe", voice="joe", input=f"Yes! {TEXT}", response_format="pcm") as answer:
        pieces = list(answer.iter_bytes())
    assert len(pieces) > 1 and sum(map(len, pieces)) > len(fast.content), [len(piece) for piece in pieces]
    for arguments, name in [
        ({"voice": "alloy"}, "voice"),
        ({"response_format": "mp3"}, "response_format"),
        ({"speed": 9}, "speed"),
        ({"instructions": "Whisper."}, "instructions"),
        ({"input": "?!"}, "input"),
        ({"input": "a" * 4097}, "input"),
    ]:
        try:
            speech.create(**({"model": "piper-joe", "voice": "joe", "input": "a", "response_format": "wav"} | arguments))
        except openai.BadRequestError as error:
            assert error.param == name, error
        else:
            raise AssertionError(f"{name} is not refused")


def leaves():
    text = " ".join([TEXT] * 90)
    with speech.with_streaming_response.create(model="piper-joe", voice="joe", input=text, response_format="pcm") as answer:
        next(answer.iter_bytes())


{"words": words, "leaves": leaves}[MODE]()
