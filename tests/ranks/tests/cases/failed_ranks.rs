//! Effects of a failed rank on the others.
use std::process::Command;
use std::time::{Duration, Instant};

use float8_shard::{Communicator, ShardError};

use super::job::{END, Ran, crowding, goes_wrong, print_line};
use super::world;

/// Longer than any test waits.
const LONG: Duration = Duration::from_secs(50);
const TIMEOUT: f64 = 1.5;

fn limited() -> Communicator {
    // SAFETY: no other thread has started.
    unsafe { std::env::set_var("FLOAT8_COMM_TIMEOUT", TIMEOUT.to_string()) };
    Communicator::from_env().unwrap()
}

fn print_error(comm: &Communicator, since: Instant, error: &ShardError) {
    print_line(&format!("rank {} failed after {:.2} s: {error}", comm.rank(), since.elapsed().as_secs_f64()));
}

fn gather(comm: &Communicator, label: &str) -> Result<(), ShardError> {
    comm.all_gather(label, vec![comm.rank() as u32; 100])?.wait().map(|_| ())
}

/// Ends this process like a program that returns an error from `main`.
fn fail(comm: Communicator, since: Instant, error: &ShardError) {
    print_error(&comm, since, error);
    drop(comm);
    std::process::exit(1);
}

/// World whose ranks have gathered once.
fn begun() -> Communicator {
    let comm = Communicator::from_env().unwrap();
    gather(&comm, "layers.0").unwrap();
    comm
}

pub fn difference() {
    let (comm, since) = (begun(), Instant::now());
    gather(&comm, "layers.1").unwrap();
    goes_wrong();
    // The last rank gathers more.
    let last = comm.rank() + 1 == comm.world_size();
    let error = comm.all_gather("layers.2", vec![0; if last { 12 } else { 10 }]).unwrap_err();
    let later = gather(&comm, "layers.3").unwrap_err();
    assert!(matches!(later, ShardError::Dead { .. }), "{later}");
    fail(comm, since, &error);
}

pub fn difference_is_named(ran: &Ran) {
    ran.fails_within(END);
    let expected = format!(
        "ranks are in different collectives: rank 0 is in collective 3 (all_gather of \"layers.2\", 40 bytes), rank {} in collective 3 \
         (all_gather of \"layers.2\", 48 bytes)",
        ran.ranks - 1
    );
    for rank in 0..ran.ranks {
        assert_eq!(ran.error(rank).1, expected, "{}", ran.output);
    }
}

/// A world whose rank 1 sleeps longer than the time limit, and the time at which the others begin to
/// wait for it.
fn without_rank_1() -> (Communicator, Instant) {
    let comm = limited();
    gather(&comm, "layers.0").unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(LONG);
    }
    goes_wrong();
    (comm, Instant::now())
}

pub fn stall() {
    let (comm, since) = without_rank_1();
    let error = gather(&comm, "layers.1").unwrap_err();
    let later = gather(&comm, "later").unwrap_err();
    assert!(matches!(later, ShardError::Dead { .. }), "{later}");
    fail(comm, since, &error);
}

pub fn stall_is_named(ran: &Ran) {
    ran.fails_within(TIMEOUT + END);
    ran.names((0..ran.ranks).filter(|rank| *rank != 1), "rank 1 has not arrived");
    for rank in 0..ran.ranks {
        let Some((seconds, error)) = ran.printed(rank) else { continue };
        assert!((TIMEOUT..TIMEOUT + 2.0 * crowding()).contains(&seconds), "{}", ran.output);
        let head = format!(
            "rank {rank} of {}: collective 2 (all_gather of \"layers.1\", 400 bytes) has not ended after ",
            ran.ranks
        );
        assert!(error.starts_with(&head), "{}", ran.output);
        assert!(error.ends_with(" s: rank 1 has not arrived, and waits in no collective"), "{}", ran.output);
    }
}

/// Rank 3 stalls, and rank 1 waits for rank 0, which waits for rank 2, which waits for rank 3.
pub fn stall_in_a_part() {
    let comm = limited();
    let [pairs, halves] = [comm.rank() / 2, comm.rank() % 2].map(|color| comm.split(color).unwrap());
    if comm.rank() == 3 {
        std::thread::sleep(LONG);
    }
    let since = Instant::now();
    goes_wrong();
    let part = if comm.rank() == 0 { &halves } else { &pairs };
    let error = gather(part, "a part").unwrap_err();
    fail(comm, since, &error);
}

pub fn stall_in_a_part_is_named(ran: &Ran) {
    ran.fails_within(TIMEOUT + END);
    ran.names(0..3, "rank 3 has not arrived");
}

pub fn stall_without_exit() {
    let (comm, since) = without_rank_1();
    let error = gather(&comm, "layers.1").unwrap_err();
    print_error(&comm, since, &error);
    // The process continues without its communicator.
    drop(comm);
    std::thread::sleep(LONG);
}

pub fn job_is_ended(ran: &Ran) {
    ran.fails_within(TIMEOUT + END);
    ran.names([0, 2], "rank 1 has not arrived");
}

/// One rank is in another collective.
pub fn astray() {
    let (comm, since) = (limited(), Instant::now());
    goes_wrong();
    let result = if comm.rank() == 2 { comm.agree("elsewhere", "") } else { gather(&comm, "layers.0") };
    let error = result.and_then(|()| gather(&comm, "layers.1")).unwrap_err();
    fail(comm, since, &error);
}

pub fn astray_is_named(ran: &Ran) {
    ran.fails_within(END);
    for rank in 0..3 {
        let (_, error) = ran.error(rank);
        let [first, other] = [
            "rank 0 is in collective 1 (all_gather of \"layers.0\"",
            "rank 2 in collective 1 (all_gather_bytes of \"elsewhere\"",
        ];
        assert!(error.contains(first) && error.contains(other), "{}", ran.output);
    }
}

/// The other ranks wait for rank 1, which runs `goes`.
fn waits_for_rank_1(goes: impl FnOnce()) {
    let comm = begun();
    if comm.rank() == 1 {
        // The other ranks are waiting by then.
        std::thread::sleep(Duration::from_millis(500));
        goes_wrong();
        goes();
    }
    let since = Instant::now();
    let error = gather(&comm, "layers.1").expect_err("rank 1 takes no part");
    fail(comm, since, &error);
}

pub fn killed() {
    waits_for_rank_1(|| {
        let kill = format!("kill -9 {}", std::process::id());
        _ = Command::new("sh").args(["-c", &kill]).status();
    });
}

pub fn panics() {
    waits_for_rank_1(|| panic!("the model is too small"));
}

pub fn exits() {
    waits_for_rank_1(|| std::process::exit(3));
}

/// Like a `main` that drops its communicator before it prints its error.
pub fn early_return() {
    let (comm, since) = (begun(), Instant::now());
    if comm.rank() == 1 {
        std::thread::sleep(Duration::from_millis(500));
        goes_wrong();
        drop(comm);
        print_line(&format!("rank 1 failed after {:.2} s: the disk is full", since.elapsed().as_secs_f64()));
        // mpirun then kills the others, which should print their errors first.
        std::thread::sleep(Duration::from_secs(1));
        std::process::exit(7);
    }
    let error = gather(&comm, "layers.1").unwrap_err();
    fail(comm, since, &error);
}

pub fn early_return_is_named(ran: &Ran) {
    ran.fails_within(END);
    // The rank's own reason is not lost.
    assert_eq!(ran.error(1).1, "the disk is full", "{}", ran.output);
    for rank in (0..ran.ranks).filter(|rank| *rank != 1) {
        let (seconds, error) = ran.error(rank);
        assert!(seconds < 2.0 * crowding(), "{}", ran.output);
        let expected = format!(
            "rank {rank} of {}: collective 2 (all_gather of \"layers.1\", 400 bytes) cannot end: rank 1 has dropped its communicator \
             after collective 1; its own error says why",
            ran.ranks
        );
        assert_eq!(error, expected, "{}", ran.output);
    }
}

/// A rank that keeps its communicator delays the others by at most the time limit.
pub fn never_leaves() {
    let (comm, since) = without_rank_1();
    drop(comm);
    print_line(&format!("rank 0 failed after {:.2} s: dropped", since.elapsed().as_secs_f64()));
    std::thread::sleep(LONG);
}

pub fn drop_has_a_limit(ran: &Ran) {
    ran.fails_within(TIMEOUT + END);
    assert!((TIMEOUT..TIMEOUT + crowding()).contains(&ran.error(0).0), "{}", ran.output);
}

/// A rank that works alone before it leaves in order, within the time limit.
pub fn slow_end() {
    let comm = begun();
    if comm.rank() == 0 {
        std::thread::sleep(Duration::from_secs(2));
    }
}

pub fn one_rank() {
    assert_eq!(Communicator::from_env().unwrap().world_size(), 1);
}

/// Variables of a launcher that did not start this process.
pub fn unconfirmed() {
    // SAFETY: no other thread has started.
    unsafe { std::env::set_var("PMI_SIZE", "4") };
    Communicator::from_env().unwrap();
}

/// The last rank's device does not exist, or NCCL, the driver or all devices are missing.
pub fn no_nccl() {
    let comm = world();
    let error = comm.with_nccl((comm.rank() == 1).then_some(4096)).unwrap_err();
    let named = matches!(error, ShardError::Nccl { .. } | ShardError::Cuda { .. } | ShardError::RankFailed { .. });
    assert!(named, "{error}");
}
