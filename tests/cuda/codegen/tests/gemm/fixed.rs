//! GEMMs with the plans that the first run on a GPU sweeps: each computes the same as the
//! estimate's choice.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute};
use cubecl_core::Runtime;
use float8_kernels::{FixedPlan, fix_gemm_plan};
use kernel_tests::Gemm;

use super::{BF16, check, config};

#[test]
fn fixed_plans() {
    // Exclusive: a plan is process-wide.
    let Some(running) = execute(Execution::default()) else { return };
    // Instructions with which two blocks make tiles together.
    for (sm, together) in [(90, "bytes.multicast::cluster"), (100, "tcgen05.mma.cta_group::2")] {
        let client = &GenerateCuda::client(&OfflineDevice { sm, sms: 4 });
        for (cols, cluster, stages) in [(256, 1, 3), (256, 2, 4), (128, 1, 6), (128, 2, 3)] {
            fix_gemm_plan(Some(FixedPlan { rows: 128, cols, cluster, stages }));
            let before = running.launches_of(together);
            for fast in [false, true] {
                check(client, Gemm { config: config(fast), out: BF16, ..Gemm::new([300, 520, 900]) });
            }
            let clusters = running.launches_of(together) - before;
            assert_eq!(clusters, if cluster == 2 { 2 } else { 0 }, "{cols} columns, {cluster} blocks on sm_{sm}");
        }
        // For a tile without a kernel the estimate chooses.
        fix_gemm_plan(Some(FixedPlan { rows: 128, cols: 96, cluster: 1, stages: 4 }));
        check(client, Gemm::new([64, 60, 130]));
        fix_gemm_plan(None);
    }
}
