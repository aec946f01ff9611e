//! GEMMs that give up a wait after ten seconds: as long as nothing is stuck they compute what others do.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use float8_kernels::{Format, Granularity, trap_stuck_barriers};

use super::{Matrix, PLAIN, Random, check};

#[test]
fn waits_that_give_up_do_not() {
    for seed in [0, 7] {
        let Some(_running) = execute(Execution { seed }) else { return };
        trap_stuck_barriers(true);
        // Two SMs make large tiles, several to a block.
        on_each([90, 100], |sm| {
            let client = &GenerateCuda::client(&OfflineDevice { sm, sms: 2 });
            let mut random = Random(13);
            let [a, b] =
                [300, 520].map(|rows| Matrix::random([rows, 300], Format::E4m3, Granularity::Tensor, &mut random));
            check(client, &a, &b, PLAIN);
        });
        trap_stuck_barriers(false);
    }
}
