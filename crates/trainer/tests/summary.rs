//! End of `cargo test`: what was skipped. Cargo runs the targets in the order of their names.

use std::io::Write;

#[test]
fn what_was_skipped() {
    let skipped = test_data::take_skipped();
    let heading = if skipped.is_empty() { "no test was skipped" } else { "tests were skipped:" };
    writeln!(std::io::stdout(), "\n{heading}\n{}", skipped.join("\n")).expect("standard output is open");
}
