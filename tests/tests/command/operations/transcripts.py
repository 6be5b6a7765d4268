"""Results of the published Whisper model with ctranslate2 through `faster-whisper`: the reference of `kvasir
operation asr`.

    python transcripts.py OUT_DIR MODEL_DIR

Writes to OUT_DIR: sound as WAV files, the encoder's output for the first one (`encoded.f32`), and
transcripts.json:

    [{"file", "flags": [..], "language": CODE, "segments": [{"start", "end", "text", "tokens", "avg_logprob",
      "no_speech_prob", "temperature", "compression_ratio", "words": [{"word", "start", "end", "probability"}..]}..]}..]

Decoding is greedy, at higher temperatures if a text is no good, and with the text of the previous window.
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
letter = [
    "Dear Mister Miller, thank you very much for your letter of the second of May.",
    "We are sorry that the machine you ordered from us arrived without its handle.",
    "Our driver will bring you a new one on Monday morning, before ten o'clock.",
    "If nobody is at home, he will leave it with your neighbors across the street.",
    "Please do not hesitate to call me, should there be any other questions.",
    "With kind regards, and a happy new year to you and your family!",
]
letter = np.concatenate([part for text in letter for part in (sound.spoken(OUT, text, "en-us"), pause)])
shop = sound.spoken(OUT, 'She asked: "Why?" Well, it costs $4.50 (or 20%), and then - after a while - he paid.', "en-us")
town = sound.spoken(OUT, "Guten Morgen. Heute ist ein schöner Tag, und wir gehen in die Stadt.", "de")
CASES = [
    ("one", np.concatenate([fox, call]), [], {}),
    # More than one window, with a prompt.
    ("two", letter, ["--prompt", "A dog."], {"initial_prompt": "A dog."}),
    ("words", letter, ["--word-times"], {"word_timestamps": True}),
    ("signs", np.concatenate([shop, pause]), ["--word-times"], {"word_timestamps": True}),
    ("german", town, ["--word-times"], {"word_timestamps": True}),
    # The sentence repeats, so the first text is compressed too much and others are drawn.
    ("repeats", np.concatenate([call, pause, fox] * 4), ["--language", "en"], {"language": "en"}),
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
        suppress_tokens=suppressed,
        **options,
    )
    keys = ("start", "end", "text", "tokens", "avg_logprob", "no_speech_prob", "temperature", "compression_ratio")
    words = ("word", "start", "end", "probability")
    segments = [
        {key: getattr(segment, key) for key in keys}
        | {"words": [{key: getattr(word, key) for key in words} for word in segment.words or []]}
        for segment in segments
    ]
    answers.append({"file": f"{name}.wav", "flags": flags, "language": told.language, "segments": segments})
(OUT / "transcripts.json").write_text(json.dumps(answers))
