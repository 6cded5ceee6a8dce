"""Compiled programs that outlive the process: kept where the user wants them, and only those of an engine."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jpaged.runtime import compilation_cache
from jpaged.runtime.compilation_cache import programs_dir, programs_kept

SETTINGS = (compilation_cache._ENABLED, compilation_cache._FOLDER, compilation_cache._LEAST_SECONDS)


@pytest.fixture(autouse=True)
def undecided(tmp_path, monkeypatch):
    """JAX's settings as they are when a user has set none, and a cache directory of the test's own."""
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation_cache, "_WORTH_KEEPING", 0.0)
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (True, None, 1.0), strict=True):
        jax.config.update(name, value)
    jax_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def settings() -> list:
    return [getattr(jax.config, name) for name in SETTINGS]


def compile_one(number: int) -> None:
    jax.jit(lambda x: x * number).lower(jnp.float32(1)).compile()


def kept(folder=None) -> int:
    return len(list((folder or programs_dir()).glob("*-cache"))) if (folder or programs_dir()).exists() else 0


def test_what_an_engine_compiles_is_kept_and_nothing_else():
    """Catches: a setting that stays behind, so that the user's own programs are kept as well; or is lost inside."""
    jnp.float32(1)
    compile_one(11)
    assert kept() == 0
    with programs_kept(True):
        compile_one(12)
        with programs_kept(True):
            compile_one(13)
        compile_one(14)
    assert kept() == 3 and settings() == [True, None, 1.0]
    compile_one(15)
    assert kept() == 3


def test_what_the_user_decided_stays(tmp_path):
    """Catches: an engine that takes another folder than the user's, or keeps what is to be kept nowhere."""
    jax.config.update(compilation_cache._FOLDER, str(tmp_path / "theirs"))
    with programs_kept(True):
        assert settings() == [True, str(tmp_path / "theirs"), 1.0]
        compile_one(21)
    jax.config.update(compilation_cache._FOLDER, None)
    jax.config.update(compilation_cache._ENABLED, False)
    with programs_kept(True):
        assert settings() == [False, None, 1.0]
    jax.config.update(compilation_cache._ENABLED, True)
    with programs_kept(False):
        assert settings() == [True, None, 1.0]
        compile_one(22)
    assert not programs_dir().exists()


def test_threads_that_compile_at_the_same_time_all_keep_what_they_compile():
    """Catches: the first to end that takes the setting from the others, or one that leaves it behind."""
    inside, first_left = threading.Barrier(2, timeout=60), threading.Event()

    def first():
        with programs_kept(True):
            inside.wait()
        first_left.set()

    def second():
        with programs_kept(True):
            inside.wait()
            assert first_left.wait(60)
            compile_one(31)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept() == 1 and settings() == [True, None, 1.0]


def test_a_folder_that_cannot_be_made_is_said_and_harmless(tmp_path, caplog):
    """Catches: a read-only home that stops an engine, or warns with every program."""
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING), programs_kept(True):
        compile_one(41)
    assert "compiled again" in caplog.text and settings() == [True, None, 1.0]
