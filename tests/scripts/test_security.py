"""SECURITY.md: every promise has tests, listed by name, that try to break it."""

import re

from tiny_models import REPOSITORY

# A promise's first words -> (file, test) of tests/.
PROMISES = {
    "No code in a model's directory": [
        ("scripts/test_bad_models", "test_code_in_a_directory_never_runs"),
        ("scripts/test_bad_models", "test_a_damaged_directory"),
    ],
    "A chat template is rendered": [
        ("data/test_templates", "test_what_grows_without_end_is_stopped"),
        ("data/test_templates", "test_what_loops_is_stopped_off_the_main_thread"),
        ("io/test_tokenizer_files", "test_what_cannot_be_read_is_one_line"),
        ("io/test_tokenizer_files", "test_what_computes_without_end_is_stopped"),
    ],
    "MBPP runs programs": [
        ("evaluate/test_sandbox", "test_hostile_programs_fail"),
        ("evaluate/test_sandbox", "test_nothing_runs_unless_allowed"),
        ("evaluate/test_sandbox", "test_nothing_runs_where_namespaces_are_forbidden"),
    ],
    "Tasks of lm-evaluation-harness grade": [
        ("evaluate/test_tasks", "test_no_grader_that_nobody_read_sees_what_a_model_wrote")
    ],
    "A call of a judge's endpoint": [
        ("evaluate/test_endpoint_deadline", "test_a_drip_does_not_outlast_the_deadline"),
        ("evaluate/test_endpoint_deadline", "test_whatever_is_answered_is_that_answers_failure"),
        ("evaluate/test_judge", "test_a_key_is_in_no_log_and_no_repr"),
        ("evaluate/test_judge", "test_half_a_key_is_not_kept"),
    ],
    "Patterns in PEFT's files": [
        ("io/test_peft", "test_what_cannot_be_read"),
        ("io/test_structure", "test_a_damaged_directory_is_refused"),
        ("io/test_doors", "test_heads_fit_what_is_saved"),
        ("io/test_fetch", "test_the_real_models_are_those_that_are_pinned"),
        ("io/test_fetch", "test_what_is_there_is_checked_once_in_each_state"),
    ],
    "Files are read only if": [
        ("io/test_read", "test_what_is_no_file_of_text"),
        ("io/test_read", "test_what_is_no_json"),
        ("data/test_prepare", "test_a_document_longer_than_memory_streams_and_ends_at_the_limit"),
        ("data/test_prepare", "test_a_line_without_end_is_refused_by_its_number"),
    ],
    "Reports treat runs as hostile": [
        ("test_hostile_cases", "test_reports"),
        ("io/test_doors", "test_archives_end_in_one_line"),
        ("io/test_doors", "test_links_between_folders_do_not_loop"),
    ],
    "No column of a data set": [("io/test_doors", "test_pictures_are_not_opened")],
    "No limit": [],
    "Config files": [("scripts/test_hostile_commands", "test_one_line")],
}


def test_every_promise_is_tried():
    text = (REPOSITORY / "SECURITY.md").read_text()
    said = [" ".join(item.split()) for item in re.split(r"(?m)^- ", text)[1:]]
    left = dict(PROMISES)
    for promise in said:
        (words,) = [words for words in left if promise.startswith(words)]
        for file, name in left.pop(words):
            source = (REPOSITORY / "tests" / f"{file}.py").read_text()
            assert f"\ndef {name}(" in source, f"{words}: tests/{file}.py has no {name}"
    assert not left
