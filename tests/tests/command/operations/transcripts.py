"""Results of the published Whisper model with ctranslate2 through `faster-whisper`: the reference of `kvasir
operation asr`.

    python transcripts.py OUT_DIR MODEL_DIR

Writes to OUT_DIR: sound as WAV files, the encoder's output for the first one (`encoded.f32`), and
transcripts.json:

    [{"file", "flags": [..], "language": CODE, "segments": [{"start", "end", "text", "tokens", "avg_logprob", "no_speech_prob"}..]}..]

Decoding is greedy, at temperature 0 alone, without the text of the previous window.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np

# Empty stand-ins for large packages that are not needed: the reader of other formats than WAV, and the hub's
# client.
for name in ("av", "huggingface_hub"):
    sys.modules[name] = types.ModuleType(name)

from faster_whisper import WhisperModel  # noqa: E402
from faster_whisper.audio import pad_or_trim  # noqa: E402

import sound  # noqa: E402

OUT, MODEL = (Path(argument) for argument in sys.argv[1:3])
RATE = 16_000

pause = np.zeros(2 * RATE)
fox = sound.spoken(OUT, "The quick brown fox jumps over the lazy dog.", "en-us")
call = sound.spoken(OUT, "Please call me back tomorrow at five o'clock, and bring the documents.", "en-us")
town = sound.spoken(OUT, "Guten Morgen. Heute ist ein schöner Tag, und wir gehen in die Stadt.", "de")
CASES = [
    ("one", np.concatenate([fox, call]), [], {}),
    # More than one window, with a prompt.
    ("two", np.concatenate([call, pause, fox] * 4), ["--prompt", "A dog."], {"initial_prompt": "A dog."}),
    ("german", town, [], {}),
    ("english", town, ["--translate", "--language", "de"], {"task": "translate", "language": "de"}),
    ("silence", np.zeros(3 * RATE), ["--language", "en"], {"language": "en"}),
]

model = WhisperModel(str(MODEL), device="cpu", compute_type="float32", cpu_threads=1)
suppressed = json.loads((MODEL / "config.json").read_text())["suppress_ids"]
answers = []
for name, samples, flags, options in CASES:
    heard = sound.write_wav(OUT, f"{name}.wav", samples, RATE)
    if name == "one":
        features = model.feature_extractor(heard)
        encoded = np.asarray(model.encode(pad_or_trim(features[:, :-1])))
        encoded.astype("<f4").tofile(OUT / "encoded.f32")
    segments, told = model.transcribe(
        heard,
        beam_size=1,
        temperature=0.0,
        condition_on_previous_text=False,
        suppress_tokens=suppressed,
        **options,
    )
    keys = ("start", "end", "text", "tokens", "avg_logprob", "no_speech_prob")
    segments = [{key: getattr(segment, key) for key in keys} for segment in segments]
    answers.append({"file": f"{name}.wav", "flags": flags, "language": told.language, "segments": segments})
(OUT / "transcripts.json").write_text(json.dumps(answers))
