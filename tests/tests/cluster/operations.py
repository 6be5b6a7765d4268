"""Sessions and calls of operations, through a client of the `websockets` package.

    python operations.py http://HOST:PORT same         speech as a recording and as sessions: the same numbers
    python operations.py http://HOST:PORT backends     speech by each backend: the same within rounding
    python operations.py http://HOST:PORT voices       wake words and voices, as recordings and as sessions
    python operations.py http://HOST:PORT speakers     which speaker speaks when, as a recording and as a session
    python operations.py http://HOST:PORT transcript   a transcript as a session and as a recording
    python operations.py http://HOST:PORT lost PID     kills the only worker that offers vad during a session
    python operations.py http://HOST:PORT drained PID  drains that worker instead
    python operations.py http://HOST:PORT limits KEY OTHER_KEY
"""

import array
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

BASE, MODE = sys.argv[1:3]
RATE = 16_000
PATIENCE = 60


def spoken(text, voice="en"):
    """Speech of espeak-ng, resampled to 16 kHz by linear interpolation. A detector accepts it as speech."""
    with tempfile.TemporaryDirectory() as directory:
        path = directory + "/spoken.wav"
        subprocess.run(["espeak-ng", "-v", voice, "-w", path, text], check=True)
        with wave.open(path) as file:
            own, sound = file.getframerate(), array.array("h", file.readframes(file.getnframes()))
    there = []
    for n in range(int((len(sound) - 1) * RATE / own)):
        at, part = divmod(n * own, RATE)
        there.append(int(sound[at] + (sound[at + 1] - sound[at]) * part / RATE))
    return there


def sound():
    """Speech, a pause, and speech again."""
    noise, pause = 1, []
    for _ in range(RATE):
        noise = (noise * 1103515245 + 12345) % 2**31
        pause.append(noise // 2**16 % 64 - 32)
    first, second = spoken("Hello, can you hear me?"), spoken("I would like to book a table for two.")
    return array.array("h", pause + first + pause + second + pause)


def wav(samples):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def call(path, samples, headers={}):
    request = urllib.request.Request(BASE + path, wav(samples), {"Content-Type": "audio/wav", **headers})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def open_session(path, headers={}):
    address = BASE.replace("http", "ws", 1) + path
    return connect(address, additional_headers=headers, proxy=None, max_queue=None,
                   open_timeout=PATIENCE, close_timeout=PATIENCE)


def event(session):
    return json.loads(session.recv(timeout=PATIENCE))


def until(session, kind):
    while True:
        told = event(session)
        if told["type"] == kind:
            return told


def rest(session):
    """Returns all remaining events, and the code of the close frame."""
    events = []
    try:
        while True:
            events.append(event(session))
    except ConnectionClosed as closed:
        return events, closed.rcvd.code


def refused(path, headers={}):
    try:
        open_session(path, headers).close()
    except InvalidStatus as refusal:
        return refusal.response.status_code, json.loads(refusal.response.body)["error"]
    raise AssertionError(f"{path} is served")


def stream(session, samples, size, floats=False):
    for start in range(0, len(samples), size):
        piece = samples[start : start + size]
        session.send(array.array("f", [x / 32768 for x in piece]).tobytes() if floats else piece.tobytes())


def numbers(events):
    windows = [(w["start"], w["probability"]) for e in events if e["type"] == "probabilities" for w in e["windows"]]
    speech = [(e["type"], e["at"]) for e in events if e["type"].startswith("speech_")]
    return windows, speech


def same():
    idle_since, idle = time.monotonic(), open_session("/v1/realtime/vad")
    samples = sound()
    answer = call("/v1/audio/vad?probabilities=true", samples)
    assert answer["object"] == "vad" and answer["samples"] == len(samples), answer
    assert len(answer["speech"]) >= 2, answer["speech"]
    assert len(answer["probabilities"]) == -(-len(samples) // answer["window"]), "a window for each"
    assert max(answer["probabilities"]) > 0.9 and min(answer["probabilities"]) < 0.1
    print("speech", [(round(s["start_s"], 2), round(s["end_s"], 2)) for s in answer["speech"]])
    expected = None
    for size, floats in [(320, False), (1600, True), (777, False), (65_536, False)]:
        encoding = "pcm_f32le" if floats else "pcm_s16le"
        with open_session(f"/v1/realtime/vad?probabilities=true&encoding={encoding}") as session:
            opened = event(session)
            assert opened["type"] == "opened" and opened["window"] == answer["window"], opened
            # Audio before a reset does not change the results.
            stream(session, samples[:30_000], size, floats)
            session.send('{"type": "reset"}')
            until(session, "reset")
            stream(session, samples, size, floats)
            session.send('{"type": "finish"}')
            events, code = rest(session)
        assert code == 1000 and events[-1]["reason"] == "finished", (code, events[-1])
        windows, speech = numbers(events)
        assert [p for _, p in windows] == answer["probabilities"], f"{size} {encoding}"
        assert [start for start, _ in windows] == [n * answer["window"] for n in range(len(windows))]
        edges = [(kind, at) for s in answer["speech"] for kind, at in (("speech_start", s["start"]), ("speech_end", s["end"]))]
        assert speech == edges, (speech, edges)
        expected = expected or speech
        assert speech == expected

    end = answer["speech"][-1]["end"]
    turn = call("/v1/audio/turn_detection", samples[:end])
    assert turn["object"] == "turn_detection" and 0 <= turn["probability"] <= 1, turn
    with open_session("/v1/realtime/turn_detection") as session:
        until(session, "opened")
        stream(session, samples[:end], 320)
        session.send('{"type": "segment"}')
        told = until(session, "turn")
        assert (told["probability"], told["complete"]) == (turn["probability"], turn["complete"]), (told, turn)
    print("turn", turn["complete"], turn["probability"])

    with urllib.request.urlopen(BASE + "/v1/models", timeout=PATIENCE) as models:
        tasks = {model["id"]: model["task"] for model in json.load(models)["data"]}
    assert tasks["silero-vad"] == "vad" and tasks["smart-turn"] == "turn_detection", tasks
    status, error = refused("/v1/realtime/vad?sample_rate=44100")
    assert (status, error["code"], error["param"]) == (400, "invalid_field", "sample_rate"), error
    status, error = refused("/v1/realtime/vad?model=smart-turn")
    assert (status, error["code"]) == (404, "model_not_found") and "silero-vad" in error["message"], error

    events, code = rest(idle)
    assert (events[-1]["reason"], code) == ("idle_timeout", 1008), events
    assert 25 < time.monotonic() - idle_since < 90


def lost():
    pid = int(sys.argv[3])
    samples = sound()
    with open_session("/v1/realtime/vad?probabilities=true") as session:
        opened = event(session)
        stream(session, samples[:RATE], 320)
        until(session, "probabilities")
        os.kill(pid, signal.SIGKILL)
        events = []
        try:
            for start in range(RATE, 100 * RATE, 320):
                session.send(samples[start % RATE : start % RATE + 320].tobytes())
                time.sleep(0.02)
        except ConnectionClosed:
            pass
        events, code = rest(session)
    last = [e for e in events if e["type"] in ("error", "closed")]
    assert [e["type"] for e in last] == ["error", "closed"], last
    assert last[0]["error"]["code"] == "worker_lost" and last[1]["reason"] == "worker_lost", last
    assert code == 1011, code
    print("lost", opened["worker"])
    status, error = refused("/v1/realtime/vad")
    assert (status, error["code"]) == (503, "no_worker") and "operation vad" in error["message"], error
    # Operations of other workers still work.
    assert call("/v1/audio/turn_detection", samples)["model"] == "smart-turn"


def drained():
    with open_session("/v1/realtime/vad") as session:
        until(session, "opened")
        os.kill(int(sys.argv[3]), signal.SIGTERM)
        # An open session continues while the worker drains. At the end of the drain it is closed with the
        # reason.
        samples = array.array("h", bytes(2 * RATE))
        began = time.monotonic()
        try:
            while time.monotonic() - began < 2 * PATIENCE:
                session.send(samples[:320].tobytes())
                time.sleep(0.02)
        except ConnectionClosed:
            pass
        events, code = rest(session)
    assert (events[-1]["reason"], code) == ("draining", 1012), (events, code)
    assert refused("/v1/realtime/vad")[0] == 503
    print("drained after", round(time.monotonic() - began, 1), "s")


def backends():
    samples, by = sound(), {}
    for backend in ("kernels", "onnx"):
        answer = call(f"/v1/audio/vad?probabilities=true&backend={backend}", samples)
        assert answer["backend"] == backend, answer["backend"]
        by[backend] = answer["probabilities"]
        with open_session(f"/v1/realtime/vad?probabilities=true&backend={backend}") as session:
            opened = event(session)
            assert opened["backend"] == backend, opened
            stream(session, samples, 1600)
            session.send('{"type": "finish"}')
            windows, _ = numbers(rest(session)[0])
        assert [p for _, p in windows] == by[backend], backend
    # Two engines agree, but not in every bit.
    difference = max(abs(a - b) for a, b in zip(*by.values(), strict=True))
    assert 0 < difference < 1e-3, difference
    assert call("/v1/audio/vad", samples)["backend"] == "kernels"
    status, error = refused("/v1/realtime/vad?backend=npu")
    assert (status, error["param"]) == (400, "backend") and '"npu"' in error["message"], error
    assert "kernels, onnx" in error["message"], error
    with open_session("/v1/realtime/turn_detection?backend=onnx") as session:
        assert event(session)["backend"] == "onnx"
    assert refused("/v1/realtime/turn_detection?backend=kernels")[1]["param"] == "backend"
    print("backends differ by", difference)


def limits():
    mine, other = ({"Authorization": f"Bearer {key}"} for key in sys.argv[3:5])
    assert refused("/v1/realtime/vad")[0] == 401
    sessions = [open_session("/v1/realtime/vad", mine) for _ in range(64)]
    status, error = refused("/v1/realtime/vad", mine)
    assert (status, error["code"]) == (429, "rate_limited") and "64 sessions" in error["message"], error
    # Another tenant's key may open a session of the operations that it may use.
    with open_session("/v1/realtime/vad", other) as session:
        until(session, "opened")
    status, error = refused("/v1/realtime/turn_detection", other)
    assert (status, error["code"]) == (503, "no_worker"), error
    # All sessions work.
    for session in sessions:
        session.send(bytes(2 * 1024))
        session.send('{"type": "segment"}')
    for session in sessions:
        assert until(session, "segmented")["at"] == 1024
        session.close()
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            open_session("/v1/realtime/vad", mine).close()
            return
        except InvalidStatus:
            assert time.monotonic() < deadline, "what has ended makes no room"


def form(fields):
    boundary = "a-boundary-between-recordings"
    parts = []
    for name, value in fields:
        file = '; filename="a.wav"\r\nContent-Type: audio/wav' if name in ("file", "reference") else ""
        parts += [f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode(), value, b"\r\n"]
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    request = urllib.request.Request(
        BASE + "/v1/audio/speaker", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def heard(answer):
    return [(word["word"], word["at"], word["probability"]) for word in answer]


def voices():
    silence = [0] * RATE
    said = array.array("h", silence + spoken("Hey Jarvis, what is the weather today?", "en-us") + silence)
    # Wake words.
    answer = call("/v1/audio/wakeword?probabilities=true&words=hey_jarvis,alexa", said)
    assert [word["word"] for word in answer["words"]] == ["hey_jarvis"], answer["words"]
    assert set(answer["probabilities"]) == {"hey_jarvis", "alexa"}
    assert answer["words"][0]["at"] < len(said) and answer["words"][0]["probability"] >= 0.5
    for size in (320, 777, 65_536):
        with open_session("/v1/realtime/wakeword?probabilities=true&words=hey_jarvis,alexa") as session:
            opened = event(session)
            assert (opened["operation"], opened["window"]) == ("wakeword", 1280), opened
            stream(session, said[:30_000], size)
            session.send('{"type": "reset"}')
            until(session, "reset")
            stream(session, said, size)
            session.send('{"type": "finish"}')
            events, code = rest(session)
        assert code == 1000, code
        assert heard(e for e in events if e["type"] == "wakeword") == heard(answer["words"]), size
        windows = [w for e in events if e["type"] == "probabilities" for w in e["windows"]]
        for word, probabilities in answer["probabilities"].items():
            assert [w["probability"] for w in windows if w["word"] == word] == probabilities, size
    status, error = refused("/v1/realtime/wakeword?words=computer")
    assert (status, error["param"]) == (400, "words") and "hey_jarvis" in error["message"], error
    print("words", answer["words"])
    # Voices.
    ann = [array.array("h", spoken(text, "en-us")) for text in ("I would like a cup of tea.", "Where is my coat?")]
    bob = array.array("h", spoken("Bonjour, je voudrais un café.", "fr+m7"))
    first = call("/v1/audio/speaker", ann[0])
    assert abs(sum(x * x for x in first["embedding"]) - 1) < 1e-4
    same, other = [form([("file", wav(ann[0])), ("reference", wav(sound))]) for sound in (ann[1], bob)]
    assert same["embedding"] == first["embedding"] and same["score"] > other["score"], (same["score"], other["score"])
    assert same["same"] == (same["score"] >= same["threshold"])
    strict = form([("file", wav(ann[0])), ("file", wav(ann[1])), ("threshold", b"1")])
    assert strict["score"] == same["score"] and not strict["same"]
    with open_session("/v1/realtime/speaker") as session:
        until(session, "opened")
        for name, vector in (("ann", same["reference_embedding"]), ("bob", other["reference_embedding"])):
            session.send(json.dumps({"type": "reference", "name": name, "embedding": vector}))
        stream(session, bob, 1600)
        session.send('{"type": "segment"}')
        scores = {score["reference"]: score for score in until(session, "embedding")["scores"]}
        assert scores["bob"]["score"] > 0.9999 and scores["bob"]["same"], scores
        session.send('{"type": "reset"}')
        stream(session, ann[0], 777)
        session.send('{"type": "finish"}')
        events, code = rest(session)
    vector = next(e for e in events if e["type"] == "embedding")
    assert code == 1000 and vector["embedding"] == first["embedding"], code
    assert abs(next(s["score"] for s in vector["scores"] if s["reference"] == "ann") - same["score"]) < 1e-6
    # Faults are named.
    for fields, name in [
        ([("file", wav(ann[0][:100]))], "file"),
        ([("file", wav(ann[0])), ("reference", wav(ann[0])[:30])], "reference"),
        ([("reference", wav(ann[0]))], "file"),
    ]:
        try:
            raise AssertionError(form(fields))
        except urllib.error.HTTPError as refusal:
            error = json.load(refusal)["error"]
            assert (refusal.code, error["param"]) == (400, name), error
    with open_session("/v1/realtime/speaker") as session:
        until(session, "opened")
        session.send(json.dumps({"type": "reference", "name": "ann", "embedding": [1.0]}))
        stream(session, ann[0], 1600)
        session.send('{"type": "segment"}')
        events, code = rest(session)
        assert (code, events[0]["type"], events[0]["error"]["param"]) == (1008, "error", "reference"), events
    print("scores", same["score"], other["score"])


def speakers():
    texts = ["Good morning, and thank you for coming to our weekly meeting.", "I have a question about the last one."]
    ann, bob = (spoken(text, voice) for text, voice in zip(texts, ("en-us", "en-us+f4")))
    silence = [0] * (RATE // 2)
    samples = array.array("h", silence + ann + silence + bob + silence + ann + silence)
    answer = call("/v1/audio/diarization", samples)
    found = [(s["start"], s["end"], s["speaker"]) for s in answer["segments"]]
    assert [speaker for *_, speaker in found] == ["SPEAKER_00", "SPEAKER_01", "SPEAKER_00"], found
    assert answer["speakers"] == 2 and answer["samples"] == len(samples), answer
    print("speakers", [(s["start_s"], s["end_s"], s["speaker"]) for s in answer["segments"]])
    one = call("/v1/audio/diarization?max_speakers=1", samples)
    assert one["speakers"] == 1 and len(one["segments"]) == 3, one
    address = BASE + "/v1/audio/diarization?response_format=rttm"
    request = urllib.request.Request(address, wav(samples), {"Content-Type": "audio/wav"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as rttm:
        lines = rttm.read().decode().splitlines()
    expected = [
        f"SPEAKER audio 1 {start / RATE:.3f} {(end - start) / RATE:.3f} <NA> <NA> {speaker} <NA> <NA>"
        for start, end, speaker in found
    ]
    assert lines == expected, lines
    # In a session, speakers keep their numbers, and the last report is the recording's.
    with open_session("/v1/realtime/diarization") as session:
        opened = event(session)
        assert (opened["operation"], opened["window"]) == ("diarization", 160_000), opened
        stream(session, samples[:RATE], 320)
        session.send('{"type": "reset"}')
        until(session, "reset")
        half = len(silence + ann) + len(silence) // 2
        stream(session, samples[:half], 777)
        session.send('{"type": "segment"}')
        first = until(session, "speakers")
        assert [s["speaker"] for s in first["segments"]] == ["SPEAKER_00"] and not first["more"], first
        assert until(session, "segmented")["at"] == half
        stream(session, samples[half:], 1600)
        session.send('{"type": "finish"}')
        events, code = rest(session)
    [last] = [e for e in events if e["type"] == "speakers"]
    assert [(s["start"], s["end"], s["speaker"]) for s in last["segments"]] == found, last
    assert code == 1000, code
    # Faults are named.
    for path, body, name in [
        ("?num_speakers=0", wav(samples[:RATE]), "num_speakers"),
        ("?num_speakers=2&max_speakers=3", wav(samples[:RATE]), "num_speakers"),
        ("?sample=1", wav(samples[:0]), "body"),
        ("", wav(samples)[:20], "body"),
        ("", b"", "body"),
    ]:
        request = urllib.request.Request(BASE + "/v1/audio/diarization" + path, body, {"Content-Type": "audio/wav"})
        try:
            raise AssertionError(urllib.request.urlopen(request, timeout=PATIENCE).read())
        except urllib.error.HTTPError as refusal:
            error = json.load(refusal)["error"]
            assert (refusal.code, error["param"]) == (400, name), (path, error)


def transcript():
    parts = [array.array("h", spoken(text, "en-us")) for text in ("The quick brown fox.", "It jumps over the lazy dog.")]
    pause = array.array("h", [0] * RATE)
    with open_session("/v1/realtime/asr?language=en&word_times=true") as session:
        opened = event(session)
        assert (opened["operation"], opened["model"]) == ("asr", "whisper-base"), opened
        stream(session, parts[0] + pause, 800)
        session.send('{"type": "segment"}')
        first = until(session, "text")
        assert "brown fox" in first["text"] and first["words"][0]["word"] == "The", first
        assert until(session, "segmented")["at"] == len(parts[0]) + RATE
        stream(session, parts[1] + pause, 1600)
        session.send('{"type": "finish"}')
        events, code = rest(session)
    # Positions continue. The text is that of the audio since the segment alone.
    [second] = [e for e in events if e["type"] == "text"]
    assert second["start"] >= len(parts[0]) + RATE and "lazy dog" in second["text"], second
    assert "fox" not in second["text"] and code == 1000, (second, code)
    assert events[-1]["samples"] == len(parts[0]) + len(parts[1]) + 2 * RATE, events
    print("transcript", first["text"], "|", second["text"])


{"same": same, "backends": backends, "voices": voices, "transcript": transcript, "speakers": speakers, "lost": lost, "drained": drained, "limits": limits}[MODE]()
