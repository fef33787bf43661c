"""Damaged checkpoints are found, named, and passed over or refused."""

import pytest

from tests.dist.runs import records, refused, run_config, run_training
from trainer.errors import UserError
from trainer.hf_export import export


def damage_a_file(path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:100])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", ["shard gone", "shard cut", "shard flipped", "metadata gone", "metadata cut", "metadata flipped", "state cut"]
)
def test_b38_a_damaged_checkpoint_is_named_and_passed_over(ranks, tmp_path, damage):
    """By auto-resume, for the newest good one, on which the run goes on bit for bit; never where it was asked for."""
    straight = ranks(2, run_training, run_config(tmp_path / "straight", training__steps=3))[0]
    ranks(2, run_training, run_config(tmp_path, training__steps=2))
    folder, (kind, how) = tmp_path / "run/checkpoints/step-00000002", damage.split()
    name = {"shard": "__1_0.distcp", "metadata": ".metadata", "state": "trainer_state.json"}[kind]
    damage_a_file(folder / name, how)
    explicit = run_config(tmp_path / "other", training__steps=3, checkpoint__resume=str(folder))
    for message in ranks(2, refused, explicit):
        assert str(folder) in message and (kind == "state" or name in message)
    resumed = ranks(2, run_training, run_config(tmp_path, training__steps=3))[0]
    assert f"resuming    {folder.parent / 'step-00000001'}" in resumed["console"]
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]
    assert all((resumed["weights"][key] == straight["weights"][key]).all() for key in straight["weights"])


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(ranks, tmp_path):
    ranks(2, run_training, run_config(tmp_path, training__steps=2))
    for folder in (tmp_path / "run/checkpoints").iterdir():
        damage_a_file(folder / "__0_0.distcp", "flipped")
    for message in ranks(2, refused, run_config(tmp_path, training__steps=3)):
        assert "every checkpoint of this run is damaged" in message


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_weights_of_a_damaged_checkpoint_are_not_taken(ranks, tmp_path, how):
    ranks(2, run_training, run_config(tmp_path, training__steps=2))
    folder = tmp_path / "run/checkpoints/step-00000002"
    damage_a_file(folder / "__1_0.distcp", how)
    for message in ranks(2, refused, run_config(tmp_path / "other", checkpoint__init_from=str(folder))):
        assert str(folder / "__1_0.distcp") in message
    with pytest.raises(UserError, match="step-00000002"):
        export(folder, tmp_path / "out", None)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_changed_digit_in_the_state_is_damage(ranks, tmp_path):
    """It is JSON still: only its own checksum tells."""
    ranks(2, run_training, run_config(tmp_path, training__steps=2))
    path = tmp_path / "run/checkpoints/step-00000002/trainer_state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    explicit = run_config(tmp_path / "other", training__steps=4, checkpoint__resume=str(path.parent))
    assert all("its checksum differs" in message for message in ranks(2, refused, explicit))
    resumed = ranks(2, run_training, run_config(tmp_path, training__steps=4))[0]
    assert "checkpoints/step-00000001" in resumed["console"]
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]


def test_what_a_kill_leaves_of_a_save_or_a_removal_goes_with_the_next_save(ranks, tmp_path):
    root = tmp_path / "run/checkpoints"
    for name in ("step-00000001.partial", "step-00000001.removed"):
        (root / name).mkdir(parents=True)
        (root / name / "__0_0.distcp").write_bytes(b"some")
    ranks(2, run_training, run_config(tmp_path, training__steps=3))
    assert sorted(folder.name for folder in root.iterdir()) == ["step-00000002", "step-00000003"]
