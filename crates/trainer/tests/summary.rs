//! Prints why tests were skipped. Cargo runs test targets in the order of their names, so this is the last.

use std::io::Write;

#[test]
fn what_was_skipped() {
    let skipped = test_data::take_skipped();
    let mut out = std::io::stdout();
    if skipped.is_empty() {
        writeln!(out, "no test was skipped").expect("standard output is open");
    }
    for (needs, tests) in skipped {
        writeln!(out, "skipped {tests} tests that need {needs}").expect("standard output is open");
    }
}
