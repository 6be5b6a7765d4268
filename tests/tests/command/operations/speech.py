"""Speech of a voice of Piper, as onnxruntime runs its network, without noise.

    python speech.py OUT MODELS   writes OUT/speech.json, OUT/N.s16 and the bundle OUT/bundle

The bundle is the voice `piper-joe` of MODELS with noise scales of 0. The phonemes are Piper's (piper-phonemize 1.1.0).
"""

import json
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime

OUT, MODELS = map(Path, sys.argv[1:3])
NAME = "en_US-joe-medium.onnx"
# A text, its speed, and the phonemes of its sentences.
CASES = [
    ("Hello, world! How are you today?", 1, ["həlˈoʊ, wˈɜːld!", "hˌaʊ ɑːɹ juː tədˈeɪ?"]),
    (
        "It cost $3.50, or was it 3.5?",
        1,
        ["ɪt kˈɔst dˈɑːlɚ θɹˈiː pɔɪnt fˈaɪv zˈiəɹoʊ, ɔːɹ wʌz ɪt θɹˈiː pɔɪnt fˈaɪv?"],
    ),
    (
        "I'm sure it's John's, e.g. the red one, i.e. this.",
        2,
        ["aɪm ʃˈʊɹ ɪts dʒˈɑːnz, fˌɔːɹɛɡzˈæmpəl ðə ɹˈɛd wˌʌn, ˌaɪˈiː ðˈɪs."],
    ),
    ('"Stop!" he cried.', 0.5, ["stˈɑːp!", "hiː kɹˈaɪd."]),
]
PAUSE = 0.2


def main():
    voice = next(MODELS.rglob(NAME))
    settings = json.loads(Path(f"{voice}.json").read_text())
    settings["inference"] = {"noise_scale": 0, "length_scale": 1, "noise_w": 0}
    bundle = OUT / "bundle" / "tts"
    bundle.mkdir(parents=True)
    (bundle / NAME).symlink_to(voice)
    (bundle / f"{NAME}.json").write_text(json.dumps(settings))
    ids, rate = settings["phoneme_id_map"], settings["audio"]["sample_rate"]
    session = onnxruntime.InferenceSession(str(voice), providers=["CPUExecutionProvider"])

    def spoken(phonemes, speed):
        known = [ids[phoneme] + ids["_"] for phoneme in unicodedata.normalize("NFD", phonemes)]
        numbers = np.array([sum([ids["^"], ids["_"], *known, ids["$"]], [])])
        inputs = {
            "input": numbers,
            "input_lengths": np.array([numbers.shape[1]]),
            "scales": np.array([0, 1 / speed, 0], np.float32),
        }
        audio = session.run(None, inputs)[0].ravel()
        return audio / np.abs(audio).max()

    cases = []
    for at, (text, speed, sentences) in enumerate(CASES):
        pause = np.zeros(int(PAUSE * rate / speed), np.float32)
        audio = [part for sentence in sentences for part in (spoken(sentence, speed), pause)][:-1]
        (np.concatenate(audio) * 32767).astype("<i2").tofile(OUT / f"{at}.s16")
        cases.append({"text": text, "voice": "joe", "speed": speed, "file": f"{at}.s16", "bundle": "bundle"})
    (OUT / "speech.json").write_text(json.dumps({"rate": rate, "cases": cases}))


main()
