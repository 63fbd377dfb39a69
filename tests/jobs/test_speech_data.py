"""python -m pytest tests/jobs/test_speech_data.py"""

import numpy as np
import torch
from transformers import audio_utils

from memfit.jobs.data.mel import filters, log_mel, spectrogram
from memfit.jobs.data.speech import frame_counts, speak, synthesize
from memfit.jobs.f5_tts import F5Tiny


def test_clips_are_speech_of_varied_length():
    clips = speak(10, 2.0, 24000)
    seconds = [clip.seconds for clip in clips]
    assert max(seconds) <= 2.0
    assert max(seconds) > 1.5 * min(seconds)
    assert len({clip.voice for clip in clips}) == 8
    for clip in clips:
        power = np.abs(np.fft.rfft(clip.wave)) ** 2
        hertz = np.fft.rfftfreq(len(clip.wave), 1 / clip.rate)
        assert np.abs(clip.wave).max() > 0.05
        assert power[(hertz > 80) & (hertz < 4000)].sum() > 0.8 * power.sum()


def test_the_same_arguments_speak_the_same():
    first = [clip.wave for clip in speak(4, 1.5, 24000)]
    for wave, again in zip(first, (clip.wave for clip in speak(5, 1.5, 24000)[:4]), strict=True):
        np.testing.assert_array_equal(wave, again)


def test_log_mel_is_that_of_transformers():
    wave = speak(1, 2.0, 24000)[0].wave
    expected = audio_utils.spectrogram(
        wave,
        window=audio_utils.window_function(1024, "hann"),
        frame_length=1024,
        hop_length=256,
        power=1.0,
        mel_filters=filters(24000, 1024, 100, "htk"),
        mel_floor=1e-5,
        log_mel="log",
    )
    mel = log_mel(torch.from_numpy(wave))
    assert mel.shape == (1 + len(wave) // 256, 100)
    torch.testing.assert_close(mel, torch.from_numpy(expected.T).float(), rtol=1e-3, atol=1e-3)


def test_spectrogram_is_that_of_transformers():
    wave = speak(1, 2.0, 32000)[0].wave
    spectrum = spectrogram(torch.from_numpy(wave)[None])[0]
    assert spectrum.shape == (1025, len(wave) // 640)
    expected = audio_utils.spectrogram(
        np.pad(wave, 704, mode="reflect"),
        window=audio_utils.window_function(2048, "hann"),
        frame_length=2048,
        hop_length=640,
        power=1.0,
        center=False,
    )
    # 1e-6 is added under the root.
    torch.testing.assert_close(spectrum, torch.from_numpy(expected).float(), rtol=1e-3, atol=2e-3)


def test_characters_are_ids_of_the_vocabulary():
    for utterance in synthesize(4, 2.0):
        ids = utterance.characters(256)
        assert len(ids) == len(utterance.text)
        assert "".join(map(chr, ids)) == utterance.text


def test_frame_counts_are_those_of_the_utterances():
    for seconds in (1.0, 2.0):
        assert frame_counts(4, seconds) == [len(utterance.mel) for utterance in synthesize(4, seconds)]


def test_lengths_of_a_job_with_clips_of_its_own_are_those_of_its_clips():
    class Own(F5Tiny):
        def dataset(self):
            return synthesize(2, 1.0)[:1]

    assert Own().lengths() == [len(synthesize(2, 1.0)[0].mel)]
    assert F5Tiny().lengths() == [len(utterance.mel) for utterance in F5Tiny().dataset()]
