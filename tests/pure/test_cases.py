"""Where each of the small cases is tested that other engines got wrong: a table that is true, and the cases that have no other home.

The cases are kinds of fault, C01 to C33; a test may stand for several, and a case may have a test in the scheduler and one on the engine.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

from jaxkv.scheduler import SchedulerConfig
from jaxkv.scheduler.fake_loop import FakeLoop

TESTS = Path(__file__).parents[1]
CASES = "pure/test_scheduler_cases.py"
SHARING, REPLAY, POLICIES = "pure/test_scheduler_sharing.py", "pure/test_scheduler_replay.py", "pure/test_scheduler_policies.py"
SHIFT, OUTPUT = "pure/test_scheduler_shift.py", "pure/test_output.py"
ENGINE, EXACT, FAULTS = "cpu/test_engine.py", "cpu/test_engine_exact.py", "cpu/test_engine_faults.py"

TABLE = {
    "C01 comes back, parked again": [
        (CASES, "a_newcomer_waits_for_room_for_its_prompt_a_token_and_the_margins"),
        (CASES, "one_parked_in_its_prompt_comes_back_by_the_same_gate_and_is_parked_once"),
    ],
    "C02 the trash page is not capacity": [
        (CASES, "the_trash_page_is_no_capacity"),
        ("cpu/test_pool.py", "usable_tokens_leave_out_the_trash_page_and_bytes_do_not"),
    ],
    "C03 parked for ever by the margin": [(CASES, "the_margin_parks_nobody_for_ever")],
    "C04 the last resident outgrows the pool": [(CASES, "a_lone_sequence_ends_at_the_pools_length_and_the_next_is_served")],
    "C05 a small one passes the head": [(CASES, "nobody_passes_the_head_however_small")],
    "C06 order scrambled": [(CASES, "the_parked_return_in_the_order_they_left_and_then_the_waiting_start")],
    "C07 two half-restored ones block each other": [(CASES, "a_return_takes_all_its_pages_or_none")],
    "C08 the victim was about to finish": [
        (CASES, "one_that_ends_in_this_step_is_not_parked"),
        (CASES, "pages_about_to_be_free_spare_a_third_one_the_park"),
    ],
    "C09 pages reused while the copy reads them": [
        (CASES, "parking_at_every_token_beside_others_keeps_every_cell"),
        ("cpu/test_transfer.py", "a_thousand_images_whose_pages_were_overwritten_at_once_come_back_equal_elsewhere"),
    ],
    "C10 free and reuse of a host image": [
        (CASES, "host_bytes_of_a_cancelled_return_are_not_used_again_before_its_copy_lands"),
        (REPLAY, "bytes_of_a_cancelled_return_are_not_used_again_while_its_copy_flies_so_the_next_is_dropped"),
    ],
    "C11 a broken image": [
        ("cpu/test_transfer.py", "a_damaged_image_is_replayed_and_changes_no_byte_of_any"),
        (FAULTS, "a_copy_to_the_device_that_raises_is_its_own_sequences_trouble"),
        ("cpu/test_engine_replay.py", "a_damaged_image_is_replayed_and_the_next_owner_of_its_pages_notices_nothing"),
    ],
    "C12 shared prefix, one sharer parked": [
        (SHARING, "a_sharer_is_parked_the_cache_given_away_and_its_pages_taken_and_it_returns_with_its_own"),
        ("cpu/test_engine_sharing.py", "under_parks_and_evictions_every_answer_is_the_same"),
    ],
    "C13 replay off by one": [
        (REPLAY, "fifty_tokens_after_a_prompt_of_three_are_fifty_two_cells_to_replay_and_the_next_token_is_the_fifty_first"),
    ],
    "C14 repeated commands": [(CASES, "repeated_commands_change_nothing_and_say_why")],
    "C15 random numbers tied to a row": [(EXACT, "the_same_seed_in_two_rows_gives_the_same_text")],
    "C16 logprobs lost or doubled": [
        (EXACT, "a_park_at_any_single_step_changes_nothing"),
        (OUTPUT, "logprobs_are_kept_once_per_token_where_asked_for"),
        ("cpu/test_engine_scores.py", "parked_after_the_second_chunk_and_at_the_fifth_token_each_is_there_once"),
    ],
    "C17 everyone leaves at once": [
        (CASES, "six_of_eight_leave_at_once_and_the_others_finish"),
        (ENGINE, "leaving_in_any_state_gives_everything_back_and_changes_nobody_else"),
    ],
    "C18 cancelled while a copy is in flight": [
        (CASES, "a_cancel_during_a_copy_ends_now_and_gives_back_when_the_copy_is_done"),
    ],
    "C19 a group of two": [
        (SHARING, "a_group_of_two_that_outgrows_the_pool_takes_turns"),
        (SHARING, "a_group_that_is_given_up_in_any_state_leaves_nothing"),
    ],
    "C20 counting tokens where pages count": [(CASES, "where_pages_count_the_pool_is_full_at_226_tokens")],
    "C21 a cap that is not one": [
        (CASES, "a_park_beyond_the_host_budget_is_refused_and_counted"),
        (REPLAY, "an_image_that_fits_is_copied_and_the_next_one_is_dropped"),
        (POLICIES, "a_budget_of_one_image_refuses_a_rotation_once_per_park"),
    ],
    "C22 tiny and empty": [
        (CASES, "tiny_answers_have_exactly_their_tokens_also_under_pressure"),
        (CASES, "wrong_requests_are_refused_at_the_door"),
        (ENGINE, "a_prompt_that_fills_the_pool_gets_one_token_and_one_more_is_refused_with_both_numbers"),
    ],
    "C23 text edges across a park": [
        (OUTPUT, "a_stop_string_spread_over_three_tokens_is_cut_and_never_shown"),
        (OUTPUT, "a_four_byte_character_over_four_tokens_comes_whole"),
        ("cpu/test_engine_replay.py", "a_stop_string_and_a_character_cut_in_two_by_a_replay_come_out_as_alone"),
    ],
    "C24 late pages tempt a second victim": [(CASES, "pages_on_their_way_out_tempt_nobody_to_park_a_second_victim")],
    "C25 polling only inside steps": [(CASES, "copies_that_land_while_nobody_runs_are_noticed")],
    "C26 two that fit alone": [(CASES, "two_that_fit_alone_take_turns")],
    "C27 two prompts": [(CASES, "two_long_prompts_complete"), (CASES, "a_long_answer_beside_a_long_prompt_completes")],
    "C28 a prompt into a nearly full pool": [(CASES, "a_prompt_into_a_nearly_full_pool_is_served_with_the_others")],
    "C29 planner off, prompt in flight": [(CASES, "a_prompt_that_arrives_late_is_computed_once")],
    "C30 taking turns": [
        (SHIFT, "generations_without_end_take_turns_by_rotation_and_all_finish"),
        ("cpu/test_shift.py", "generations_without_end_take_turns_on_a_real_model_and_all_finish_as_if_alone"),
        (POLICIES, "the_smallest_whose_pages_let_the_head_in_leaves_else_the_largest"),
        (SHIFT, "a_budget_of_one_image_lets_nobody_rotate_and_says_so_once_per_park"),
    ],
    "C31 hold, no page until the copy lands": [(CASES, "with_held_pages_the_step_waits_until_the_copy_lands")],
    "C32 two engines, one process": [
        ("pure/test_cases.py", "two_schedulers_in_one_process_keep_each_its_own_policy"),
        (EXACT, "an_engine_closed_in_the_middle_of_everything_leaves_the_next_one_clean"),
    ],
    "C33 a raise in each phase of a step": [
        ("pure/test_scheduler_recover.py", "a_step_may_break_off_at_any_line_of_the_scheduler"),
        (FAULTS, "whatever_breaks_a_step_off_is_made_good"),
        (SHIFT.replace("pure/test_scheduler", "cpu/test"), "a_shift_that_fails_ends_that_sequence_alone"),
    ],
}


def test_there_are_thirty_three() -> None:
    assert [name[:3] for name in TABLE] == [f"C{number:02}" for number in range(1, 34)]


@pytest.mark.parametrize("case", TABLE)
def test_each_case_has_the_tests_that_the_table_names(case: str) -> None:
    assert TABLE[case]
    for file, name in TABLE[case]:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert f"test_{name}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no test_{name}"


def test_two_schedulers_in_one_process_keep_each_its_own_policy() -> None:
    """One lets smaller ones pass and the other nobody, step by step beside each other, and again after both are done."""
    sizes: dict[str, Any] = {"rows": 2, "num_pages": 64, "page_size": 1, "prefill_chunk": 32, "max_len": 1000, "margin_steps": 0}
    for _ in range(2):
        jobs = {resume: FakeLoop(SchedulerConfig(**sizes, resume=resume)) for resume in ("head", "pass")}
        for job in jobs.values():
            job.add(0, 40, 20)
            job.add(1, 50, 4)  # does not fit beside the first
            job.add(2, 4, 4)
        while not all(job.scheduler.is_idle for job in jobs.values()):
            for job in jobs.values():
                job.step()
        assert {resume: job.noted("admit") for resume, job in jobs.items()} == {"head": [0, 1, 2], "pass": [0, 2, 1]}
        assert all(job.tokens == {0: 20, 1: 4, 2: 4} for job in jobs.values())
