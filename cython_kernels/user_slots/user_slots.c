/* A copy of the table in use, with functions of users in some of its slots. Each is called through a guard, which sends lengths
 * that were not checked to the built-in function. */
#include "user_slots/user_slots.h"

static pw_kernels filled_table;
static const pw_kernels *built_in;
static pw_op_kernels users;

static void guarded_rms_norm(int64_t n, const float *x, const float *w, float eps, float *y) {
    (pw_slot_length_is_checked(n) ? users.rmsnorm : built_in->ops.rmsnorm)(n, x, w, eps, y);
}

static void guarded_exponential(int64_t n, const float *x, float *y) {
    (pw_slot_length_is_checked(n) ? users.exponential : built_in->ops.exponential)(n, x, y);
}

#define GUARDED_GATE(NAME)                                                                                       \
    static void guarded_##NAME##_gate(int64_t n, const float *gate, const float *up, float *y) {                 \
        const pw_op_kernels *ops = pw_slot_length_is_checked(n) ? &users : &built_in->ops;                       \
        ops->gates[PW_GATE_##NAME](n, gate, up, y);                                                              \
    }
PW_EACH_GATE(GUARDED_GATE)

#define GUARDED_ACTIVATION(NAME)                                                                                 \
    static void guarded_##NAME(int64_t n, const float *x, const float *bias, float *y) {                         \
        const pw_op_kernels *ops = pw_slot_length_is_checked(n) ? &users : &built_in->ops;                       \
        ops->activations[PW_ACT_##NAME](n, x, bias, y);                                                          \
    }
PW_EACH_ACTIVATION(GUARDED_ACTIVATION)

#define GATE_GUARD(NAME) [PW_GATE_##NAME] = guarded_##NAME##_gate,
#define ACTIVATION_GUARD(NAME) [PW_ACT_##NAME] = guarded_##NAME,
static const pw_op_kernels guards = {
    .rmsnorm = guarded_rms_norm,
    .exponential = guarded_exponential,
    .gates = {PW_EACH_GATE(GATE_GUARD)},
    .activations = {PW_EACH_ACTIVATION(ACTIVATION_GUARD)},
};

pw_slot_function pw_slot_of(const pw_op_kernels *ops, int slot) {
    if (slot == PW_SLOT_RMS_NORM) return (pw_slot_function)ops->rmsnorm;
    if (slot == PW_SLOT_EXPONENTIAL) return (pw_slot_function)ops->exponential;
    if (slot < PW_SLOT_ACTIVATIONS) return (pw_slot_function)ops->gates[slot - PW_SLOT_GATES];
    return (pw_slot_function)ops->activations[slot - PW_SLOT_ACTIVATIONS];
}

static void put(pw_op_kernels *ops, int slot, pw_slot_function function) {
    if (slot == PW_SLOT_RMS_NORM) ops->rmsnorm = (pw_rms_norm_slot *)function;
    else if (slot == PW_SLOT_EXPONENTIAL) ops->exponential = (pw_exponential_slot *)function;
    else if (slot < PW_SLOT_ACTIVATIONS) ops->gates[slot - PW_SLOT_GATES] = (pw_gate_slot *)function;
    else ops->activations[slot - PW_SLOT_ACTIVATIONS] = (pw_activation_slot *)function;
}

void pw_fill_slot(int slot, pw_slot_function function) {
    if (pw_active() != &filled_table) {
        built_in = pw_active();
        filled_table = *built_in;
    }
    put(&users, slot, function);
    put(&filled_table.ops, slot, pw_slot_of(&guards, slot));
    pw_use_table(&filled_table);
}

void pw_empty_slots(void) {
    if (pw_active() == &filled_table) pw_use_table(built_in);
}

int pw_slot_is_filled(int slot) {
    return pw_active() == &filled_table && pw_slot_of(&filled_table.ops, slot) == pw_slot_of(&guards, slot);
}
