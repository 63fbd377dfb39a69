"""python -m pytest tests/jobs/test_frames.py"""

import numpy as np
from transformers import WhisperFeatureExtractor

from memfit.jobs.data import frames as video


def test_the_mouth_follows_the_loudness():
    look = np.full(8, 0.5)
    dark = [(video.draw_face(look, opening, 64)[:, 40:60, 20:44].sum(0) < 150).sum() for opening in (0.0, 0.5, 1.0)]
    assert dark[0] < dark[1] < dark[2]


def test_loudness_is_of_the_sound_under_a_frame():
    step = video.RATE // video.FPS
    wave = np.concatenate([np.zeros(step), np.full(step, 0.5), np.full(step, 0.25)])
    np.testing.assert_allclose(video.loudness(wave), [0, 1, 0.5])


def test_shapes_of_a_clip():
    clip = video.talking_clips(2, 16, 64)[1]
    assert clip.frames.shape == clip.reference.shape == (16, 3, 64, 64)
    assert clip.frames.dtype == np.uint8
    assert clip.frames.std(0).max() > 10, "the mouth moves"
    assert video.whisper_mel(clip.wave).shape == (80, 3000)
    assert video.sync_mel(clip.wave, clip.start).shape == (1, 80, 52)
    assert video.cepstra(clip.wave, 7).shape == (7, 1, 13, 20)


def test_positions_are_of_the_frames_own_30_seconds():
    np.testing.assert_array_equal(video.whisper_positions(100, 1)[0], np.arange(196, 206))
    np.testing.assert_array_equal(video.whisper_positions(0, 1)[0, :5], [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(video.whisper_positions(751, 1)[0], [0, 0, 0, 1, 2, 3, 4, 5, 6, 7])


def test_the_log_mel_is_whispers():
    wave = video.talking_clips(2, 16, 64)[0].wave
    whispers = WhisperFeatureExtractor()(wave, sampling_rate=video.RATE, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(video.whisper_mel(wave), whispers, atol=1e-4)
