//! Results of the collectives.
use float8_shard::{Communicator, Count, Operation, ShardError};
use test_data::Random;

/// All results, one after the other in one job.
pub fn results() {
    let comm = Communicator::from_env().unwrap();
    each_collective(&comm);
    sums_are_exact_and_repeat(&comm);
    overlap(&comm);
    from_another_thread(&comm);
    bad_input(&comm);
    agreement(&comm);
    if comm.world_size() == 4 {
        split(&comm);
    }
    dropped_pending(&comm);
}

fn each_collective(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.world_size());
    let variable = |name| std::env::var(name).unwrap().parse::<usize>().unwrap();
    assert_eq!((rank, size), (variable("OMPI_COMM_WORLD_RANK"), variable("OMPI_COMM_WORLD_SIZE")));
    assert_eq!(comm.local_rank(), variable("OMPI_COMM_WORLD_LOCAL_RANK"));
    let each = |of: fn(usize) -> f32| (0..size).map(of).sum::<f32>();

    let words = comm.all_gather("words", vec![rank as u32 * 10, 7]).unwrap().wait().unwrap();
    let all: Vec<u32> = (0..size as u32).flat_map(|rank| [rank * 10, 7]).collect();
    assert_eq!(words, all);

    let bytes = comm.all_gather_bytes("names", &vec![b'a' + rank as u8; rank * 3]).unwrap();
    let names: Vec<_> = (0..size).map(|rank| vec![b'a' + rank as u8; rank * 3]).collect();
    assert_eq!(bytes, names);

    let rows: Vec<f32> = (0..2 * size).map(|row| (row * 100 + rank) as f32).collect();
    let mine = comm.reduce_scatter_sum("rows", rows).unwrap().wait().unwrap();
    let ranks = each(|rank| rank as f32);
    let sums = [2 * rank, 2 * rank + 1].map(|row| (row * 100 * size) as f32 + ranks);
    assert_eq!(mine, sums);

    let sum = comm.all_reduce_sum("sum", vec![rank as f32, 1.0]).unwrap().wait().unwrap();
    assert_eq!(sum, [ranks, size as f32]);

    // NaN of either rank wins; subnormals and infinities are ordered.
    let amax = if rank == size - 1 { [f32::NAN, 3.0, 1e-40, 2.0] } else { [1.0, f32::INFINITY, 0.0, rank as f32] };
    let max = comm.all_reduce_max_bits("amax", amax.map(f32::to_bits).to_vec()).unwrap().wait().unwrap();
    let max: Vec<f32> = max.into_iter().map(f32::from_bits).collect();
    assert!(max[0].is_nan() && max[1] == f32::INFINITY && max[2] == 1e-40 && max[3] == 2.0, "{max:?}");

    let words = (0..size as u32).flat_map(|to| [100 * rank as u32 + to, to]).collect();
    let all: Vec<u32> = comm.all_to_all("exchange", words).unwrap().wait().unwrap();
    assert_eq!(all, (0..size as u32).flat_map(|from| [100 * from + rank as u32, rank as u32]).collect::<Vec<_>>());

    // Empty collectives return empty results.
    assert_eq!(comm.all_gather("none", vec![]).unwrap().wait().unwrap(), [0; 0]);
    assert_eq!(comm.reduce_scatter_sum("none", vec![]).unwrap().wait().unwrap(), [0.0; 0]);

    let (r, traffic) = (size as u64, comm.traffic());
    assert_eq!(traffic.operation(Operation::AllGather), Count { calls: 2, sent: 8, received: 8 * (r - 1) });
    assert_eq!(traffic.operation(Operation::ReduceScatterSum), Count { calls: 2, sent: 8 * r, received: 8 * (r - 1) });
    assert_eq!(traffic.operation(Operation::AllToAll), Count { calls: 1, sent: 8 * r, received: 8 * (r - 1) });
    assert_eq!(traffic.operation(Operation::AllReduceSum), Count { calls: 1, sent: 8, received: 16 * (r - 1) / r });
    let names = (0..r).map(|rank| rank * 3).sum::<u64>();
    let own = rank as u64 * 3;
    assert_eq!(traffic.operation(Operation::AllGatherBytes), Count { calls: 1, sent: own, received: names - own });
}

/// Numbers whose sums are rounded.
fn rough(rank: usize, count: usize) -> Vec<f32> {
    Random::new(rank as u64).values(count)
}

fn sums_are_exact_and_repeat(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.world_size());
    for count in [size, 1000 * size, 300_000 * size] {
        let own = rough(rank, count);
        let all: Vec<_> = (0..size).map(|rank| rough(rank, count)).collect();
        let reduce = || comm.all_reduce_sum("all", own.clone()).unwrap().wait().unwrap();
        let scatter = || comm.reduce_scatter_sum("chunk", own.clone()).unwrap().wait().unwrap();
        let (whole, chunk) = (reduce(), scatter());
        let start = rank * count / size;
        if size == 2 {
            let sum: Vec<f32> = all[0].iter().zip(&all[1]).map(|(a, b)| a + b).collect();
            assert!(whole == sum && chunk == sum[start..][..count / size]);
        }
        for (i, sum) in whole.iter().chain(&chunk).enumerate() {
            let at = if i < count { i } else { start + i - count };
            let exact: f64 = all.iter().map(|values| f64::from(values[at])).sum();
            let scale: f64 = all.iter().map(|values| f64::from(values[at].abs())).sum();
            assert!(
                (f64::from(*sum) - exact).abs() <= 4.0 * f64::from(f32::EPSILON) * scale,
                "{at}: {sum} for {exact}"
            );
        }
        for _ in 0..3 {
            assert!(reduce() == whole && scatter() == chunk, "a sum is not what it was");
        }
        let bits = whole.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let ranks = comm.all_gather_bytes("bits", &bits).unwrap();
        assert!(ranks.iter().all(|other| *other == bits), "ranks have different sums");
    }
}

fn overlap(comm: &Communicator) {
    let rank = comm.rank() as u32;
    let large = |rank: u32| (0..2_000_000).map(move |i: u32| i.wrapping_mul(2_654_435_761) ^ rank);
    let first = comm.all_gather("next", vec![rank; 1000]).unwrap();
    let second = comm.all_gather("after", large(rank).collect()).unwrap();
    let sums = comm.reduce_scatter_sum("gradient", vec![1.0; 1_000_000 * comm.world_size()]).unwrap();
    // Ranks wait in different orders.
    let (first, second, sums) = if rank == 0 {
        let sums = sums.wait().unwrap();
        let second = second.wait().unwrap();
        (first.wait().unwrap(), second, sums)
    } else {
        (first.wait().unwrap(), second.wait().unwrap(), sums.wait().unwrap())
    };
    let ranks = 0..comm.world_size() as u32;
    assert!(first.into_iter().eq(ranks.clone().flat_map(|from| [from; 1000])));
    assert!(second.into_iter().eq(ranks.flat_map(large)));
    assert!(sums.len() == 1_000_000 && sums.iter().all(|sum| *sum == comm.world_size() as f32));
}

fn dropped_pending(comm: &Communicator) {
    let rank = comm.rank() as u32;
    for round in 0..20 {
        let pending = comm.all_gather("unused", vec![rank; 200_000]).unwrap();
        // One rank drops a pending that the others wait for.
        if rank == round % comm.world_size() as u32 {
            drop(pending);
        } else {
            assert_eq!(pending.wait().unwrap()[0], 0);
        }
        assert_eq!(comm.all_gather("used", vec![rank, round]).unwrap().wait().unwrap()[..2], [0, round]);
    }
    // The communicator ends with dropped transfers in flight.
    drop(comm.all_gather("last", vec![rank; 1_000_000]).unwrap());
    drop(comm.all_reduce_sum("last", vec![1.0; 1_000_000]).unwrap());
}

fn from_another_thread(comm: &Communicator) {
    let size = comm.world_size() as u32;
    let other = comm.clone();
    let thread = std::thread::spawn(move || {
        let pending = other.all_reduce_max_bits("there", vec![other.rank() as u32]).unwrap();
        (pending, other)
    });
    let (pending, other) = thread.join().unwrap();
    assert_eq!(pending.wait().unwrap(), [size - 1]);
    let thread = std::thread::spawn(move || other.agree("there", ""));
    thread.join().unwrap().unwrap();
}

fn bad_input(comm: &Communicator) {
    let world_size = comm.world_size();
    let error = comm.reduce_scatter_sum("wq", vec![0.0; world_size + 1]).unwrap_err();
    let text =
        format!("reduce_scatter_sum of \"wq\": {} elements cannot be split among {world_size} ranks", world_size + 1);
    assert!(error.to_string().starts_with(&text), "{error}");
    let error = comm.all_to_all("wq", vec![0; world_size + 1]).unwrap_err();
    assert!(error.to_string().starts_with("all_to_all of \"wq\": "), "{error}");
    let error = Communicator::from_env().unwrap_err();
    assert!(matches!(error, ShardError::Mpi { .. }), "{error}");
    // Failed calls took no number.
    comm.agree("end", "").unwrap();
}

fn agreement(comm: &Communicator) {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    comm.agree("the version", "0.1.0").unwrap();
    let config = if rank == last { "lr = 1\nsteps = 8" } else { "lr = 1\nsteps = 4" };
    let error = comm.agree("the config", config).unwrap_err().to_string();
    let expected = format!(
        "the config is not the same on all ranks; the first difference is in line 2: \"steps = 4\" on rank 0, \"steps = 8\" on rank {last}"
    );
    assert_eq!(error, expected);

    assert_eq!(comm.all_ok::<_, &str>("reading", Ok(rank)).unwrap(), rank);
    let read = if rank == last { Err("no such file: data.bin") } else { Ok(()) };
    let error = comm.all_ok("reading the data", read).unwrap_err().to_string();
    assert_eq!(error, format!("reading the data failed on rank {last}: no such file: data.bin"));
    // The first rank's error is returned if several fail.
    let error = comm.all_ok::<(), _>("reading", Err(format!("of rank {rank}"))).unwrap_err().to_string();
    assert_eq!(error, "reading failed on rank 0: of rank 0");
}

/// Two parts of two ranks, each with its own collectives, next to the collectives of all ranks.
fn split(comm: &Communicator) {
    let rank = comm.rank();
    let [pairs, halves] = [rank / 2, rank % 2].map(|color| comm.split(color).unwrap());
    assert_eq!([pairs.rank(), pairs.world_size(), halves.rank(), halves.world_size()], [rank % 2, 2, rank / 2, 2]);
    for round in 0..20 {
        let sum = |comm: &Communicator| comm.all_reduce_sum("ranks", vec![(rank + round) as f32; 1000]).unwrap();
        let (of_pair, of_half, of_all) = (sum(&pairs), sum(&halves), sum(comm));
        // Different orders of waiting.
        let all = if rank == 0 { Some(of_all.wait().unwrap()) } else { None };
        assert_eq!(of_half.wait().unwrap(), [(2 * (rank % 2) + 2 + 2 * round) as f32; 1000]);
        assert_eq!(of_pair.wait().unwrap(), [(4 * (rank / 2) + 1 + 2 * round) as f32; 1000]);
        assert_eq!(all.unwrap_or_default().first().map_or(0.0, |sum| sum - (6 + 4 * round) as f32), 0.0);
    }
    assert_eq!(
        pairs.all_gather_bytes("names", &[rank as u8]).unwrap(),
        [[2 * (rank / 2) as u8], [2 * (rank / 2) as u8 + 1]]
    );
    assert_eq!(comm.split(0).unwrap().split(rank).unwrap().world_size(), 1);
    drop((pairs, halves));
}
