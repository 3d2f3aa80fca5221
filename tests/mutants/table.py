"""The lines that safety hangs on, and what each becomes when it is taken out. The tests beside it must turn red.

`original` must stand in `file` exactly once: a line that has moved on is an error of this table, not a killed mutant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`name` as in docs/promises.md. `quick`: part of `make test`; the others of `make mutants`."""

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]
    quick: bool = True


PLAN, SEEN = "agent/volume/plan.py", "agent/volume/seen.py"
PLAN_TESTS = ("tests/agent/volume/test_volume_plan.py",)
POWER_TESTS = ("tests/training/slotfile/test_checkpoint_power.py::test_no_power_loss_loses_an_acknowledged_checkpoint",)

# Not here: the fsync of a checkpoint's data before its commit mark, and of the folder before a slot is overwritten.
# With either taken out test_checkpoint_power.py stays green: what is torn then is found by its checksum and was
# never acknowledged, and the other slots are whole. They spare a file from being set aside, no checkpoint from loss.
MUTANTS = (
    Mutant(
        "term check before mount",
        PLAN,
        '    if term_of(target) != term:\n        return Wait(f"term',
        '    if False:\n        return Wait(f"term',
        PLAN_TESTS,
    ),
    Mutant(
        "claim before create",
        PLAN,
        "        return ClaimTerm(claim.number + 1, reason)\n",
        "        return _as_holder(desired, observed, claim.number + 1)\n",
        PLAN_TESTS,
    ),
    Mutant(
        "re-observation after the claim",
        "agent/volume/observe.py",
        "    match action:\n        case Attach(volume):\n",
        '    if type(action).__name__ == "ClaimTerm":\n'
        '        return replace(seen, claim=Claim(action.number, ctx.desired.instance, ctx.desired.zone, ""))\n'
        "    match action:\n        case Attach(volume):\n",
        ("tests/agent/life/test_safety.py",),
    ),
    Mutant(
        "no mkfs on what may hold data",
        PLAN,
        "    if unused and (device.blank or half_made):\n",
        "    if fresh and (device.blank or half_made):\n",
        PLAN_TESTS,
    ),
    Mutant(
        "a working copy is on the disk before it is called complete",
        "agent/repository/working_copy.py",
        '            copied = programs.run(["sync", "-f", str(self._incoming)], seconds_max=SYNC_SECONDS_MAX)\n',
        "            pass\n",
        ("tests/agent/repository/test_working_copy.py::test_a_copy_that_is_not_on_the_disk_is_not_called_complete",),
    ),
    Mutant(
        "what the trainer wrote is moved before the copies change places",
        "agent/repository/working_copy.py",
        "                    rest = self._carry(clone)\n                    os.rename(clone, rest)\n",
        "                    os.rename(clone, self._outgoing)\n                    self._carry(self._outgoing)\n",
        ("tests/agent/repository/test_working_copy.py::test_a_machine_may_be_lost_at_any_step_of_a_change_of_commit",),
        quick=False,
    ),
    Mutant(
        "a machine that shuts down keeps its claim of the shared copy",
        "agent/nodes/shared_copy.py",
        "        return holder.has_ended\n",
        "        return holder.is_gone\n",
        ("tests/agent/nodes/test_shared_copy.py::test_a_claim_passes_on_only_once_no_process_of_its_machine_runs",),
    ),
    Mutant(
        "no configuration of a trainer's for git",
        "agent/repository/checkout.py",
        "        if alone:\n            self._environment = {",
        "        if False:\n            self._environment = {",
        ("tests/agent/cage/test_secrets.py::test_no_filter_that_a_trainer_set_up_runs_beside_the_token",),
    ),
    Mutant(
        "snapshot before detach",
        "agent/interruption/handover.py",
        "            _snapshot(result, steps, clock, watcher)\n        if result.snapshot and result.unmounted:\n",
        "            if result.unmounted:\n"
        '                _try_until_the_end(result, steps, clock, watcher, "detach the volume", steps.detach)\n'
        "            _snapshot(result, steps, clock, watcher)\n        if result.snapshot and result.unmounted:\n",
        ("tests/agent/interruption/test_interruption.py",),
    ),
    Mutant(
        "no handover of what is not on the device yet",
        "agent/interruption/handover.py",
        "        if result.unmounted or result.frozen:\n            _snapshot(",
        "        if True:\n            _snapshot(",
        ("tests/agent/interruption/test_interruption.py",),
    ),
    Mutant(
        "purpose check at adoption",
        SEEN,
        "        and snapshot.tags.get(TAG_PURPOSE) == Purpose.HANDOVER.value\n",
        "",
        PLAN_TESTS,
    ),
    Mutant(
        "later term mounted",
        SEEN,
        "        and term_of(snapshot) >= max(oldest, 1)\n",
        "",
        PLAN_TESTS,
    ),
    Mutant(
        "empty answer means wait",
        PLAN,
        "    if observed.volume_gone_for < VOLUME_GONE_SECONDS:\n",
        "    if False:\n",
        PLAN_TESTS,
    ),
    Mutant(
        "serial check",
        "agent/machine/host.py",
        "        if volume and (newest := self.find_device(volume, attached_as)) != device:\n",
        "        if False and (newest := self.find_device(volume, attached_as)) != device:\n",
        ("tests/agent/machine/test_host_programs.py",),
    ),
    Mutant(
        "blank check before mkfs",
        "agent/machine/host.py",
        "        if not (blank or (again and self._may_be_unfinished(device))):\n",
        "        if False:\n",
        ("tests/agent/machine/test_host_programs.py",),
    ),
    Mutant(
        "a foreign signature is not formatted over",
        "agent/machine/host.py",
        "(again and self._may_be_unfinished(device))",
        "again",
        ("tests/agent/machine/test_host_programs.py",),
    ),
    Mutant(
        "blank check before mkfs, in the decision",
        PLAN,
        "    if unused and (device.blank or half_made):\n",
        "    if unused:\n",
        PLAN_TESTS,
    ),
    Mutant(
        "a mount is tried before mkfs is done again",
        PLAN,
        "(not device.filesystem or target.id in observed.unmountable)",
        "True",
        PLAN_TESTS,
    ),
    Mutant(
        "living holder never forced",
        PLAN,
        '        return _await_release(observed, holder, f"{holder} has {volume.id} ({attachment.state})")\n',
        "        return DetachFrom(volume.id, holder, reason, True)\n",
        PLAN_TESTS,
    ),
    Mutant(
        "supersede only after verify",
        PLAN,
        "        if fault:\n            return Reject(",
        "        if False:\n            return Reject(",
        PLAN_TESTS,
    ),
    Mutant(
        "retention only after a checkpoint",
        "agent/volume/retention.py",
        "    if acknowledged_step is None:\n",
        "    if False:\n",
        ("tests/agent/volume/test_volume_retention.py",),
    ),
    Mutant(
        "token in CreateVolume",
        "agent/aws/ec2.py",
        '            "ClientToken": self.token,\n',
        "",
        ("tests/agent/volume/test_volume_ec2.py",),
    ),
    Mutant(
        "401 refresh",
        "agent/aws/imds.py",
        "                if status != 401:\n                    break\n",
        "                break\n",
        ("tests/agent/aws/test_metadata.py::test_a_401_is_answered_with_a_new_token",),
    ),
    Mutant(
        "garbage is not a notice",
        "agent/aws/imds.py",
        '    if body.get("action") not in ("terminate", "stop", "hibernate"):\n',
        "    if False:\n",
        ("tests/agent/aws/test_metadata.py::test_what_makes_no_sense_is_unknown",),
    ),
    Mutant(
        "garbage is not a notice, nor the end of one",
        "agent/interruption/watcher.py",
        "            if answer is UNKNOWN:\n",
        "            if False:\n",
        ("tests/agent/interruption/test_interruption.py::test_answers_without_sense_change_nothing",),
    ),
    Mutant(
        "end-after-stop is an interruption",
        "agent/trainer/attempts.py",
        "    if end.asked:\n        return Stopped()\n",
        "",
        ("tests/agent/trainer/test_supervisor_rules.py",),
    ),
    Mutant(
        "failure budget reset only by a step",
        "agent/trainer/attempts.py",
        "    if end.gained:\n",
        "    if True:\n",
        ("tests/agent/trainer/test_supervisor_rules.py",),
    ),
    Mutant(
        "foreign fleet never cancelled",
        "agent/aws/ec2.py",
        "        description = self.instance(instance)\n        if description is None:\n            raise Retryable(",
        "        description = next(iter(self._instances([], instance)), None)\n"
        "        if description is None:\n            raise Retryable(",
        ("tests/agent/life/test_safety.py",),
    ),
    Mutant(
        "foreign fleet never cancelled, whatever the store says",
        "agent/life/finish.py",
        "    if fleet:\n        return fleet\n",
        "",
        ("tests/agent/life/test_safety.py",),
    ),
    Mutant(
        "a term of an earlier life is not written under again",
        "agent/volume/observe.py",
        "        released |= {claim.number}\n",
        "        pass\n",
        (
            "tests/simulation/test_simulated_life.py::test_a_machine_that_lives_on_writes_nothing_that_its_handover_would_hide",
        ),
    ),
    Mutant(
        "fsync of the file",
        "training/slotfile/slots.py",
        "        files.write(fd, whole, 0)\n        files.fsync(fd)\n",
        "        files.write(fd, whole, 0)\n",
        POWER_TESTS,
        quick=False,  # imports torch
    ),
    Mutant(
        "fsync of the directory",
        "training/slotfile/slots.py",
        "        files.sync_folder(self.folder)\n        return final\n",
        "        return final\n",
        POWER_TESTS,
        quick=False,  # imports torch
    ),
    Mutant(
        "checksum at load",
        "training/slotfile/slots.py",
        "            if chunk_checksum() != header.checksums[index]:\n",
        "            if False:\n",
        ("tests/training/slotfile/test_checkpoint_store.py::test_a_thousand_flipped_bits_are_all_found",),
        quick=False,  # imports torch
    ),
    Mutant(
        "buffers copied before the step goes on",
        "training/checkpoint.py",
        "            copy.wait()\n            self._held",
        "            self._held",
        ("tests/training/slotfile/test_checkpoint_store.py::test_what_changes_after_the_save_is_not_in_it",),
        quick=False,  # imports torch
    ),
    Mutant(
        "every process of the cage's user is ended",
        "agent/processes/group.py",
        "    while survivors := owned_by(account.uid):\n",
        "    while survivors := set[int]():\n",
        ("tests/agent/cage/test_cage.py::test_what_another_program_started_as_the_user_ends_with_the_trainer_too",),
        quick=False,  # needs root, as the next two do
    ),
    Mutant(
        "no new privileges in the cage",
        "agent/processes/sandbox_exec.py",
        "            _prctl(_PR_SET_NO_NEW_PRIVS, 1)\n",
        "            pass\n",
        ("tests/agent/cage/test_cage.py::test_only_its_own_folders_are_writable_and_no_program_gives_rights",),
        quick=False,
    ),
    Mutant(
        "the cage refuses system calls",
        "agent/processes/sandbox_exec.py",
        '            if orders["sandbox"]["filters"]:\n',
        "            if False:\n",
        (
            "tests/attacks/test_cage_attacks.py"
            "::test_the_log_tells_the_first_refused_call_of_each_kind_and_not_without_end",
        ),
        quick=False,
    ),
    Mutant(
        "of /run only what is kept is in the cage",
        "agent/processes/sandbox_exec.py",
        '            _empty(place, sandbox["kept"] + writable)\n',
        "            pass\n",
        ("tests/attacks/test_cage_attacks.py::test_nothing_of_what_lies_outside_came_back",),
        quick=False,
    ),
    Mutant(
        "packets of no user do not reach the metadata service",
        "agent/cage/network.py",
        'related accept\\n    {to} reject"\n',
        'related accept"\n',
        ("tests/attacks/test_cage_network.py",),
        quick=False,
    ),
    Mutant(
        "the machine is read-only in the cage",
        "agent/processes/sandbox_exec.py",
        "            _make_read_only(place, flags)\n",
        "            pass\n",
        ("tests/agent/cage/test_cage.py::test_only_its_own_folders_are_writable_and_no_program_gives_rights",),
        quick=False,
    ),
    Mutant(
        "the cage's packets are turned to the relay",
        "agent/cage/network.py",
        '        lines.append(f"{_to(address)} tcp dport 80 redirect to :{port}")\n',
        "        pass\n",
        (
            "tests/agent/cage/test_relay.py::test_from_the_cages_user_no_credentials_are_to_be_had_by_any_address_and_polling_works",
        ),
        quick=False,
    ),
    Mutant(
        "the relay asks for two paths alone",
        "agent/cage/imds_proxy.py",
        "        if path in (SPOT_ACTION, REBALANCE):\n",
        '        if path.startswith("/latest/meta-data/"):\n',
        ("tests/agent/cage/test_relay.py::test_no_path_makes_the_relay_ask_for_another_than_the_two",),
    ),
    Mutant(
        "a relay without an answer says so",
        "agent/cage/imds_proxy.py",
        "                    answer = _Answer(503)  #",
        "                    answer = _Answer(404)  #",
        ("tests/agent/cage/test_relay.py::test_a_service_that_does_not_answer_is_not_taken_for_no_notice",),
        quick=False,
    ),
    Mutant(
        "secrets are taken out before a line is cut",
        "agent/processes/output.py",
        "        text = self._secrets.text(readable(self._open[:end]))\n",
        "        text = readable(self._open[:end])\n",
        ("tests/agent/protocol/test_redaction.py::test_a_secret_is_found_wherever_chunks_and_lines_are_cut",),
        quick=False,
    ),
    Mutant(
        "the end of an unfinished line is kept",
        "agent/processes/output.py",
        "        until = max(0, len(text) - self._secrets.overlap) // self._max * self._max\n",
        "        until = len(text)\n",
        ("tests/agent/protocol/test_redaction.py::test_a_secret_is_found_wherever_chunks_and_lines_are_cut",),
        quick=False,
    ),
    Mutant(
        "what is fetched is known to the redaction",
        "agent/cage/secrets.py",
        "        SECRETS.learn([*answers.values(), *values.values()])\n",
        "        pass\n",
        ("tests/agent/cage/test_secrets.py::test_secrets_of_both_services_are_fetched_and_known_to_the_redaction",),
        quick=False,
    ),
    Mutant(
        "a token goes to the repository's host alone",
        "agent/repository/git_access.py",
        'f"credential.{host}.helper={helper}"',
        'f"credential.helper={helper}"',
        ("tests/agent/cage/test_secrets.py::test_the_token_goes_to_the_repositorys_own_host_alone",),
        quick=False,
    ),
    Mutant(
        "user data refuses secrets",
        "fleet/request/userdata.py",
        "    refuse_secrets(config.job)\n",
        "",
        ("tests/userdata/test_userdata_hostile.py::test_what_looks_like_a_token_is_refused_with_the_field_and_the_cure",),
    ),
)
