//! GEMMs that give up a wait after ten seconds: as long as nothing is stuck they compute what others do.

use checks::Gemm;
use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use float8_kernels::trap_stuck_barriers;

use super::check;

#[test]
fn waits_that_give_up_do_not() {
    for seed in [0, 7] {
        let Some(_running) = execute(Execution { seed }) else { return };
        trap_stuck_barriers(true);
        // Two SMs make large tiles, several to a block.
        on_each([90, 100], |sm| {
            check(&GenerateCuda::client(&OfflineDevice { sm, sms: 2 }), Gemm::new([300, 520, 300]));
        });
        trap_stuck_barriers(false);
    }
}
