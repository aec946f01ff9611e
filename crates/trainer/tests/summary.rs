//! End of `cargo test`: what was skipped. Cargo runs the targets in the order of their names.

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
