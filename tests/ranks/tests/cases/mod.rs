//! Cases by name, with their numbers of ranks.
mod adapters;
mod codes;
mod experts;
mod experts_model;
mod failures;
mod mesh;
mod parallel;
mod parallel_mesh;
mod parallel_model;
mod traffic;
mod training;

use float8_shard::Communicator;

/// Program that several ranks run together.
pub struct Case {
    pub name: &'static str,
    pub ranks: &'static [usize],
    pub run: fn(),
    pub variables: &'static [(&'static str, &'static str)],
    pub ends: Ends,
}

/// Expected end of a job.
pub enum Ends {
    Well,
    /// Fails with an error that contains all of these words.
    Saying(&'static [&'static str]),
}

const fn well(name: &'static str, ranks: &'static [usize], run: fn()) -> Case {
    Case { name, ranks, run, variables: &[], ends: Ends::Well }
}

/// Numbers of ranks of a case in bf16, which wgpu lacks.
const BF16: &[usize] = if cfg!(feature = "staged") { &[] } else { &[2, 3] };

pub const ALL: &[Case] = &[
    well("codes_are_those_of_a_cast_of_the_whole", &[2, 3, 4], codes::are_those_of_a_cast_of_the_whole),
    well("a_nan_in_the_rows_of_one_rank", &[2, 3], codes::a_nan_in_the_rows_of_one_rank),
    well("any_number_of_rows", &[2, 3], codes::any_number_of_rows),
    well("an_empty_batch_counts_in_histories", &[2, 4], codes::an_empty_batch_counts_in_histories),
    well("an_empty_batch_on_one_rank", &[2], codes::an_empty_batch_on_one_rank),
    well("high_precision_is_gathered_too", &[2, 3], codes::high_precision_is_gathered_too),
    well("two_ranks_are_one_with_accumulation", &[2], training::two_ranks_are_one_with_accumulation),
    well("a_tied_output", &[2], training::a_tied_output),
    well("a_mesh_is_one_rank_for_a_small_net", &[4], mesh::of_a_small_net),
    well("a_mesh_is_one_rank_for_llama", &[4], mesh::of_llama),
    well("a_mesh_is_one_rank_for_a_mixture", &[4], mesh::of_a_mixture),
    well("gradients_of_a_mesh", &[4], mesh::has_the_gradients_of_one_rank),
    well("a_mesh_of_another_size_is_refused", &[4], mesh::of_another_size_is_refused),
    well("codes_of_parallel_linears", &[2, 4], parallel::codes_are_those_of_a_cast_of_the_whole),
    well("codes_of_fp8_only_parts", &[2, 4], adapters::codes_of_fp8_only_parts),
    well("adapters_of_parts", &[2, 4], adapters::adapters_of_parts_are_those_of_the_whole),
    well("bytes_of_parallel_gathers", &[2, 4], parallel::bytes_of_gathers),
    well("parallel_plans_that_are_refused", &[2], parallel::plans_that_are_refused),
    well("a_parallel_decoder", &[2, 4], parallel_model::has_the_gradients_of_one_rank),
    well("a_parallel_block", &[2, 4], parallel::a_block_trains_as_on_one_rank),
    well("codes_of_experts", &[2, 4], experts::codes_are_those_of_all_tokens),
    well("bytes_of_experts", &[2, 4], experts::bytes_of_rows),
    well("experts_of_a_decoder", &[2, 4], experts_model::have_the_gradients_of_one_rank),
    well("experts_train", &[2, 4], experts_model::train_as_on_one_rank),
    well("whole_experts_load", &[2, 4], experts_model::load_and_gather),
    well("experts_that_are_refused", &[2], experts_model::that_are_refused),
    well("gradients_of_a_mesh_of_parts", &[4], parallel_mesh::has_the_gradients_of_one_rank),
    well("codes_of_a_mesh_of_parts", &[4], parallel_mesh::codes_are_those_of_a_cast_of_the_whole),
    well("a_mesh_of_other_parts_is_refused", &[4], parallel_mesh::of_other_parts_is_refused),
    well("whole_parameters_load", &[2], training::whole_parameters_load),
    well("gradients_in_bf16", BF16, training::gradients_in_bf16),
    well("gradients_that_wait", &[2, 3], training::gradients_that_wait),
    well("reduce_scatters_overlap", &[2, 4], training::reduce_scatters_overlap),
    well("gathers_run_ahead", &[2], traffic::gathers_run_ahead),
    well("gathers_of_recomputation", &[2], traffic::gathers_of_recomputation),
    well("bytes_on_the_wire", &[2, 4], traffic::bytes_on_the_wire),
    well("memory_of_a_rank", &[2, 4], traffic::memory_of_a_rank),
    well("models_that_differ_are_refused", &[2], failures::models_that_differ_are_refused),
    well("ranks_that_would_part_are_refused", &[2, 3], failures::ranks_that_would_part_are_refused),
    well("what_cannot_be_sharded_is_refused", &[2], failures::what_cannot_be_sharded_is_refused),
    Case {
        name: "muon_is_refused",
        ranks: &[2],
        run: failures::muon,
        variables: &[],
        ends: Ends::Saying(&["up: its weight is sharded", "Muon"]),
    },
    Case {
        name: "a_record_of_another_shape_is_refused",
        ranks: &[2],
        run: failures::record_of_another_shape,
        variables: &[],
        ends: Ends::Saying(&["linear: [48, 32] was loaded", "[64, 32] and the rows of each of 2 ranks [32, 32]"]),
    },
    Case {
        name: "a_step_of_one_rank_alone_is_named",
        ranks: &[2, 4],
        run: failures::a_step_of_one_rank_alone,
        variables: &[("FLOAT8_COMM_TIMEOUT", "20")],
        ends: Ends::Saying(&["ranks are in different collectives: rank 0 is in", "rank 1 in"]),
    },
    Case {
        name: "a_matmul_with_a_shard_is_refused",
        ranks: &[2],
        run: failures::matmul_with_a_shard,
        variables: &[],
        ends: Ends::Saying(&["embedding: its weight is sharded", "float8_shard::full_tensor"]),
    },
    Case {
        name: "the_full_tensor_of_a_transpose_is_refused",
        ranks: &[2],
        run: failures::full_tensor_of_a_transpose,
        variables: &[],
        ends: Ends::Saying(&["embedding: full_tensor is of a shard [32, 40]", "not of [40, 32]"]),
    },
    Case {
        name: "a_rank_that_sleeps_is_named",
        ranks: &[2, 3],
        run: failures::a_rank_that_sleeps,
        variables: &[("FLOAT8_COMM_TIMEOUT", "2")],
        ends: Ends::Saying(&["all_reduce_max_bits of \"linear\"", "has not ended after", "rank 1 has not arrived"]),
    },
    Case {
        name: "the_first_difference_is_named",
        ranks: &[2],
        run: failures::ranks_that_differ,
        variables: &[("FLOAT8_COMM_TIMEOUT", "20")],
        ends: Ends::Saying(&["different collectives", "of \"up\"", "of \"down\""]),
    },
];

/// Communicator of this process: MPI starts only once.
fn world() -> Communicator {
    thread_local! {
        static WORLD: Communicator = {
            #[cfg(feature = "staged")]
            float8_shard::stage_collectives();
            Communicator::from_env().unwrap()
        };
    }
    WORLD.with(Clone::clone)
}
