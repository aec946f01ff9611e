//! Tests on real ranks: each case runs under mpirun, with a time limit. An argument selects cases
//! by a part of their names.

mod cases;
mod launch;
mod values;

use std::time::{Duration, Instant};

use launch::{CASE, Ran, run};

/// Name, numbers of ranks, program of the ranks, and check of the result.
type Case = (&'static str, &'static [usize], fn(), fn(&Ran));

const CASES: &[Case] = &[
    ("values", &[2, 3, 4], values::of_collectives, Ran::succeeds),
    ("split_stall", &[4], cases::stall_in_a_part, cases::stall_in_a_part_is_named),
    ("difference", &[4], cases::difference, cases::difference_is_named),
    ("stall", &[4], cases::stall, cases::stall_is_named),
    ("stall_without_exit", &[3], cases::stall_without_exit, cases::job_is_ended),
    ("astray", &[3], cases::astray, cases::astray_is_named),
    ("killed", &[4], cases::killed, cases::kill_ends_all),
    ("panic", &[4], cases::panics, cases::panic_ends_all),
    ("early_return", &[4], cases::early_return, cases::early_return_is_named),
    ("exit", &[4], cases::exits, cases::exit_ends_all),
    ("never_left", &[2], cases::never_leaves, cases::drop_has_a_limit),
    ("slow_end", &[2], cases::slow_end, Ran::succeeds),
    ("one_rank", &[1], cases::one_rank, Ran::succeeds),
    ("unconfirmed", &[0], cases::unconfirmed, cases::unconfirmed_is_named),
    #[cfg(feature = "nccl")]
    ("nccl_missing", &[2], cases::no_nccl, Ran::succeeds),
];

fn main() {
    let named = |name: &str| CASES.iter().find(|case| case.0 == name);
    if let Some((_, _, rank, _)) = std::env::var(CASE).ok().as_deref().and_then(named) {
        // Without mpirun nothing else would end this process.
        std::thread::spawn(|| {
            std::thread::sleep(launch::LIMIT + Duration::from_secs(5));
            std::process::abort();
        });
        return rank();
    }
    let filter = std::env::args().nth(1).filter(|argument| !argument.starts_with('-'));
    let selected = CASES.iter().filter(|case| filter.as_ref().is_none_or(|filter| case.0.contains(filter.as_str())));
    let mut cases = 0;
    for (name, sizes, _, check) in selected {
        for size in *sizes {
            let start = Instant::now();
            let ran = run(name, *size);
            check(&ran);
            cases += 1;
            println!("{name}, {size} ranks: ok in {:.1} s{}", start.elapsed().as_secs_f64(), ran.notes());
        }
    }
    println!("{cases} cases passed");
}
