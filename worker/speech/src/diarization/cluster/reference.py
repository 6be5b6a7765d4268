"""Clusters of scipy's linkage and fcluster by the rules of pyannote.audio 3.

    PYTHONPATH=../../../../../tests/tests/command/operations python reference.py OUT MODELS > reference.json

Needs numpy, scipy, onnx and onnxruntime. The rules are those of diarization.py, which needs the two folders.
"""

import json

import numpy as np

import diarization

rng = np.random.default_rng(31)
cases = []
for count, speakers, spread, threshold, minimum, maximum in [
    (2, 1, 0.1, 0.7, 1, 2),
    (9, 3, 0.2, 0.7, 1, 9),
    (40, 3, 0.3, 0.7, 1, 40),
    (40, 3, 0.3, 0.2, 1, 40),
    (40, 5, 0.4, 0.7, 2, 2),
    (40, 2, 0.6, 1.5, 4, 40),
    (60, 4, 0.5, 0.5, 1, 3),
    (150, 4, 0.4, 0.6, 1, 150),
    (30, 2, 0.2, 0.7, 25, 30),
]:
    centers = rng.normal(0, 1, (speakers, 4))
    voices = centers[rng.integers(0, speakers, count)] + rng.normal(0, spread, (count, 4))
    voices = np.round(voices, 2)
    number = minimum if minimum == maximum else None
    clusters = diarization.cluster(voices, minimum, maximum, number, threshold)
    cases.append({
        "voices": voices.tolist(),
        "threshold": threshold,
        "min": minimum,
        "max": maximum,
        "clusters": clusters.tolist(),
    })
print(json.dumps(cases))
